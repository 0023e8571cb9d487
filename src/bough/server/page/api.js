// The server's HTTP interface: requests, event streams and error messages. Does not touch the DOM.

/** `kind`: unreachable, key, busy, loading, refused or broken. */
export class RequestFailed extends Error {
  constructor(kind, message, { hint = "", retryAfter = 0 } = {}) {
    super(message);
    this.kind = kind;
    this.hint = hint;
    this.retryAfter = retryAfter;
  }
}

const KINDS = { 401: "key", 429: "busy", 503: "loading" };

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, { body, key, signal } = {}) {
  try {
    return await fetch(path, {
      method: body ? "POST" : "GET",
      headers: headers(key),
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new RequestFailed("unreachable", "The server does not respond.", {
      hint: "Is “bough serve” still running? Nothing you typed is lost.",
    });
  }
}

/** Turns a server message, which is a clause, into a sentence. */
function sentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

async function failure(response) {
  let error = {};
  try {
    const body = await response.json();
    error = body.error ?? body;
  } catch {
    // Not JSON: from a proxy, or the server died during the response.
  }
  const message = typeof error === "string" ? error : error.message;
  return new RequestFailed(KINDS[response.status] ?? "refused", sentence(message) || `The server answered ${response.status} ${response.statusText}.`, {
    hint: error.hint ?? "",
    retryAfter: Number(response.headers.get("Retry-After")) || 0,
  });
}

/** Returns a JSON document; throws RequestFailed. */
export async function getJson(path, options) {
  const response = await send(path, options);
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Returns {ready, message}; `ready` is false while the model loads. Throws RequestFailed if the server is unreachable. */
export async function health(signal) {
  const response = await send("health", { signal });
  if (response.ok) return { ready: true, message: "" };
  const error = await failure(response);
  return { ready: false, message: error.message };
}

/** Yields {data} and {comment} of a server-sent event stream. */
async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
        else if (line === "" && data.length) {
          yield { data: data.join("\n") };
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function* chunkEvents(chunk) {
  const choice = chunk.choices?.[0];
  const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
  if (chunk.bough?.tree) yield { type: "tree", tree: chunk.bough.tree };
  if (chunk.bough?.progress) yield { type: "progress", ...chunk.bough.progress };
  if (reasoning) yield { type: "reasoning", text: reasoning };
  if (choice?.delta?.content) yield { type: "content", text: choice.delta.content };
  if (choice?.finish_reason) yield { type: "finish", reason: choice.finish_reason };
  if (chunk.bough?.stats) yield { type: "stats", stats: chunk.bough.stats };
  if (chunk.usage) yield { type: "usage", usage: chunk.usage };
}

/** Lets the server read the beginning of a request before the rest is typed; returns {ready_tokens, ...}. */
export async function prefill(body, { key, signal }) {
  const response = await send("v1/prefill", { body, key, signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/**
 * Requests one answer and yields its events: content, reasoning, tree, progress, note, finish, stats, usage.
 * Throws RequestFailed, or the abort error when `signal` aborts.
 */
export async function* streamChat(body, { key, signal }) {
  const response = await send("v1/chat/completions", { body, key, signal });
  if (!response.ok) throw await failure(response);
  let complete = false;
  try {
    for await (const event of serverEvents(response.body)) {
      if (event.comment !== undefined) {
        if (event.comment) yield { type: "note", text: event.comment };
      } else if (event.data === "[DONE]") {
        complete = true;
      } else {
        const chunk = JSON.parse(event.data);
        if (chunk.error) {
          complete = true;
          throw new RequestFailed("refused", sentence(chunk.error.message ?? String(chunk.error)), { hint: chunk.error.hint ?? "" });
        }
        yield* chunkEvents(chunk);
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof RequestFailed) throw error;
    throw new RequestFailed("broken", "The connection was lost.", { hint: "The text received so far is kept." });
  }
  if (!complete) throw new RequestFailed("broken", "The connection was lost.", { hint: "The text received so far is kept." });
}
