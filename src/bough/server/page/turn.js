// One answer with retries: waits for a loading or busy server and prompts for a key. Does not touch the DOM.

import { RequestFailed, health, streamChat } from "./api.js";

const LOADING_POLL_MS = 1000;

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

async function waitWhileBusy(seconds, { signal, onWait }) {
  for (let left = Math.max(1, Math.ceil(seconds)); left > 0; left--) {
    onWait(`The server has too many requests. Trying again in ${left} s.`);
    await pause(1000, signal);
  }
}

async function waitWhileLoading({ signal, onWait }) {
  for (;;) {
    const state = await health(signal);
    if (state.ready) return;
    onWait(state.message || "The model is loading.");
    await pause(LOADING_POLL_MS, signal);
  }
}

/**
 * Streams the answer to `body` into `onEvent`. `getKey(again)` returns the key, prompting the user if `again`, or
 * null if the user cancels. `onWait` receives status messages while the server is not ready.
 */
export async function runTurn(body, { signal, getKey, onEvent, onWait }) {
  let key = await getKey(false);
  for (;;) {
    try {
      for await (const event of streamChat(body, { key, signal })) onEvent(event);
      return;
    } catch (error) {
      if (!(error instanceof RequestFailed)) throw error;
      if (error.kind === "busy") {
        await waitWhileBusy(error.retryAfter || 2, { signal, onWait });
      } else if (error.kind === "loading") {
        onWait(error.message);
        await pause(LOADING_POLL_MS, signal);
        await waitWhileLoading({ signal, onWait });
      } else if (error.kind === "key") {
        onWait("The server needs a key.");
        key = await getKey(true);
        if (key === null) throw error;
      } else {
        throw error;
      }
    }
  }
}

/** Returns a keep-alive comment as a sentence; empty if it has no progress. */
export function noteInWords(text) {
  const queue = /queue\D*(\d+)/i.exec(text);
  if (queue) {
    const ahead = Number(queue[1]);
    return ahead > 0 ? `Waiting: ${ahead} ${ahead === 1 ? "request is" : "requests are"} ahead.` : "Next in the queue.";
  }
  const prefill = /(\d+)\s*(?:\/|of)\s*(\d+)/i.exec(text);
  if (prefill) return progressInWords({ done: Number(prefill[1]), total: Number(prefill[2]) });
  return "";
}

export function progressInWords({ done, total }) {
  return `Reading the prompt: ${done.toLocaleString("en")} of ${total.toLocaleString("en")} tokens.`;
}
