// The open chat: sends messages, receives answers, saves both.

import { RequestFailed, prefill } from "./api.js";
import { askForKey } from "./dialogs.js";
import { MessageView } from "./messages.js";
import { keepPictures, loadPictures, withPictures } from "./pictures.js";
import { chats, key } from "./store.js";
import { Trace, firstDifference } from "./trace.js";
import { noteInWords, progressInWords, runTurn } from "./turn.js";

const SAVE_EVERY_MS = 1000;

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "max_tokens"];

// Sampling of Regenerate: as recommended, and then where a short text came again: as /regen of a chat in a terminal.
const WARMER = [{}, ...[1, 1.3, 1.6].map((temperature) => ({ temperature, top_p: 0.95 }))];
const SHORT = 1000; // characters: a longer text that comes again is a copy of the prompt, and takes long

const optional = (name, value) => (value === "" ? {} : { [name]: Number(value) });

/** Returns the body of a chat request. It always has a seed, so that the answer can be repeated. */
function requestBody(messages, settings, { model, seed, budget, trees }) {
  // Skip answers that have no text.
  const history = messages.filter(({ content, images }) => content || images?.length).map((message) => ({ role: message.role, content: withPictures(message) }));
  if (settings.system.trim()) history.unshift({ role: "system", content: settings.system });
  return {
    model,
    messages: history,
    stream: true,
    stream_options: { include_usage: true },
    seed,
    ...Object.assign({}, ...NUMBERS.map((name) => optional(name, settings[name]))),
    ...(settings.thinking === "own" ? {} : { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } }),
    bough: { trees, ...optional("budget", budget) },
  };
}

export class Conversation {
  /** `hooks`: onState(running, comparing), onStatus(sentence), onGrow(), onModel() -> name, onContext(tokens). */
  constructor(host, { panel, getSettings, hooks }) {
    this.host = host;
    this.panel = panel;
    this.getSettings = getSettings;
    this.hooks = hooks;
    this.abort = null;
    this.comparing = null;
    this.last = null;
    this.reading = null;
    this.open(chats.reopen() ?? chats.create());
  }

  /** Closes the open chat without saving it. */
  discard() {
    this.chat.messages = [];
    this.open(chats.create());
  }

  open(chat) {
    // Save before stopping: the abort handler runs when another chat is already open.
    if (this.abort) this.#save();
    this.stop();
    this.stopReading();
    this.chat = chat;
    this.views = [];
    this.last = null;
    chats.opened(chat);
    for (const message of chat.messages) if (message.state === "writing") message.state = "stopped";
    this.host.replaceChildren();
    for (const message of chat.messages) this.#show(message);
    this.loading = loadPictures(chat.messages)?.then(() => {
      this.loading = null;
      if (chat === this.chat) for (const view of this.views) view.refresh();
    });
    this.panel.clear();
    this.hooks.onStatus("");
    this.hooks.onContext(chat.messages.findLast((message) => message.context)?.context ?? 0);
    this.#notify();
  }

  /** Gives the chat a name of the user's; an empty one takes it back. */
  rename(chat, name) {
    const open = chat.id === this.chat.id ? this.chat : chat;
    open.name = name.trim();
    chats.save(open);
  }

  #notify() {
    this.hooks.onState(Boolean(this.abort), Boolean(this.comparing));
  }

  get running() {
    return Boolean(this.abort || this.comparing);
  }

  stop() {
    this.abort?.abort();
    this.stopComparing();
  }

  stopComparing() {
    this.comparing?.abort();
  }

  /** Lets the server read a message while its end is still being typed. Failures do not matter. */
  async readAhead(text, images) {
    const same = images.map(({ id }) => id).join() === this.reading?.images.map(({ id }) => id).join();
    if (this.reading && same && text.startsWith(this.reading.text)) return;
    this.stopReading();
    const abort = new AbortController();
    this.reading = { text, images, abort };
    const messages = [...this.chat.messages, { role: "user", content: text, images }];
    const { messages: history, chat_template_kwargs } = requestBody(messages, this.getSettings(), {});
    try {
      const found = await prefill({ model: this.hooks.onModel(), messages: history, ...(chat_template_kwargs && { chat_template_kwargs }) }, { key: key.load(), signal: abort.signal });
      if (!abort.signal.aborted && found.ready_tokens) this.hooks.onStatus(`Read ahead: ${found.ready_tokens.toLocaleString("en")} tokens.`);
    } catch (error) {
      if (!abort.signal.aborted && !(error instanceof RequestFailed)) throw error;
    }
  }

  stopReading() {
    this.reading?.abort.abort();
    this.reading = null;
  }

  viewOf(node) {
    return this.views.find((view) => view.root === node.closest(".message"));
  }

  #show(message) {
    const view = new MessageView(message);
    this.views.push(view);
    this.host.append(view.root);
    return view;
  }

  #truncate(length) {
    this.chat.messages.length = length;
    for (const view of this.views.splice(length)) view.root.remove();
  }

  #save() {
    this.chat.updated = Date.now();
    if (!chats.save(this.chat)) this.hooks.onStatus("This browser’s storage is full: the chat is not saved.");
  }

  send(text, images = []) {
    this.stopReading();
    const message = { role: "user", content: text, ...(images.length ? { images } : {}) };
    keepPictures(images);
    this.chat.messages.push(message);
    this.#show(message);
    return this.#answer();
  }

  resend(view, text) {
    const index = this.views.indexOf(view);
    this.stop();
    this.#truncate(index);
    return this.send(text, view.message.images);
  }

  regenerate(view) {
    const index = this.views.indexOf(view);
    const before = this.chat.messages[index];
    this.stop();
    this.#truncate(index);
    return this.#answer(before);
  }

  /** Answers the last message; `before`: the answer that this one replaces, by another seed; `again`: as it was there before. */
  async #answer(before, again = false) {
    this.stop();
    if (this.loading) await this.loading;
    const settings = this.getSettings();
    const earlier = before ? [...(before.earlier ?? []), before.content] : [];
    const fixed = (before?.seed ?? Number(settings.seed) - 1) + 1;
    const seed = settings.seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : fixed % 2 ** 32;
    const options = { model: this.hooks.onModel(), seed, budget: settings.budget, trees: true };
    const own = settings.temperature !== "" || settings.top_p !== "";
    const warmth = own ? 0 : again ? before.warmth + 1 : Number(before?.warmth > 0);
    const body = { ...requestBody(this.chat.messages, settings, options), ...WARMER[warmth] };
    const message = { role: "assistant", content: "", reasoning: "", state: "writing", seed, ...(before && { earlier, warmth }) };
    this.chat.messages.push(message);
    this.#save();
    const run = { view: this.#show(message), message, trace: new Trace(), body, chat: this.chat, savedAt: 0 };
    this.last = run;
    this.panel.show(run.trace);
    const abort = new AbortController();
    this.abort = abort;
    this.#notify();
    this.hooks.onStatus("Sent.");
    this.hooks.onGrow();
    try {
      await runTurn(body, { ...this.#turnHooks(abort), onEvent: (event) => this.#handle(run, event) });
      if (message.state === "writing") message.state = "done";
      const same = message.content && earlier.includes(message.content);
      const short = message.content.length + message.reasoning.length <= SHORT;
      if (same && short && !own && warmth + 1 < WARMER.length && this.abort === abort && run.chat === this.chat) {
        this.#truncate(this.chat.messages.indexOf(message));
        return await this.#answer(message, true);
      }
      if (same) message.note = "The same text, although by another seed: a higher temperature gives others.";
      else if (warmth) message.note = `Sampled at temperature ${WARMER[warmth].temperature}, as the recommended sampling gave the same text.`;
      this.hooks.onStatus("Done.");
    } catch (error) {
      this.#fail(run, error, abort);
    }
    run.view.refresh();
    if (run.chat === this.chat) this.#save();
    this.panel.refresh();
    if (this.abort !== abort) return;
    this.abort = null;
    this.#notify();
    this.hooks.onGrow();
    if (this.getSettings().compare) await this.compareLast();
  }

  #turnHooks(abort) {
    return {
      signal: abort.signal,
      getKey: async (again) => (again ? askForKey() : key.load()),
      onWait: (sentence) => this.hooks.onStatus(sentence),
    };
  }

  #handle(run, event) {
    const { message } = run;
    if (event.type === "content") message.content += event.text;
    else if (event.type === "reasoning") message.reasoning += event.text;
    else if (event.type === "tree") run.trace.add(event.tree);
    else if (event.type === "stats") run.trace.stats = message.stats = event.stats;
    else if (event.type === "usage") this.#useContext(message, event.usage);
    else if (event.type === "finish" && event.reason === "length") message.state = "length";
    else if (event.type === "progress") this.hooks.onStatus(progressInWords(event));
    else if (event.type === "note" && !message.content && !message.reasoning) this.#note(event.text);
    if (event.type === "tree") this.panel.refresh();
    if (event.type === "content" || event.type === "reasoning") {
      this.hooks.onStatus(message.content ? "Writing…" : "Thinking…");
      this.#refreshSoon(run);
    }
  }

  #useContext(message, { prompt_tokens = 0, completion_tokens = 0 }) {
    message.context = prompt_tokens + completion_tokens;
    this.hooks.onContext(message.context);
  }

  #note(text) {
    const sentence = noteInWords(text);
    if (sentence) this.hooks.onStatus(sentence);
  }

  #refreshSoon(run) {
    if (run.frame) return;
    run.frame = requestAnimationFrame(() => {
      run.frame = 0;
      run.view.refresh();
      this.hooks.onGrow();
      if (performance.now() - run.savedAt > SAVE_EVERY_MS && run.chat === this.chat) {
        run.savedAt = performance.now();
        this.#save();
      }
    });
  }

  #fail(run, error, abort) {
    const { message } = run;
    if (abort.signal.aborted) {
      message.state = "stopped";
      message.stats ??= run.trace.partial;
      this.hooks.onStatus("Stopped.");
    } else if (error instanceof RequestFailed) {
      message.state = "failed";
      message.error = { message: error.message, hint: error.hint };
      this.hooks.onStatus("");
    } else {
      message.state = "failed";
      message.error = { message: "The page could not show the answer.", hint: error.message };
      this.hooks.onStatus("");
      reportError(error);
    }
  }

  /** Repeats the last answer without trees and with the same seed, and shows both speeds. */
  async compareLast() {
    const run = this.last;
    if (!run || this.running || !run.message.content || run.message.state === "failed") return;
    const abort = new AbortController();
    this.comparing = abort;
    const plain = new Trace();
    const wanted = run.message.reasoning + run.message.content;
    const comparison = { state: "running", plain, characters: 0, difference: -1 };
    const texts = { reasoning: "", content: "" };
    // A stopped answer is repeated up to the length it had.
    const enough = () => run.message.state === "stopped" && texts.content.length >= run.message.content.length;
    this.panel.compare(comparison);
    this.#notify();
    try {
      const body = { ...run.body, bough: { trees: true, budget: 0 } };
      await runTurn(body, {
        ...this.#turnHooks(abort),
        onEvent: (event) => {
          if (event.type in texts) texts[event.type] += event.text;
          else if (event.type === "tree") plain.add(event.tree);
          else if (event.type === "stats") plain.stats = event.stats;
          comparison.characters = texts.reasoning.length + texts.content.length;
          this.panel.refresh();
          if (enough()) abort.abort();
        },
      });
      comparison.state = "done";
    } catch (error) {
      if (!abort.signal.aborted && !(error instanceof RequestFailed)) throw error;
      comparison.state = enough() ? "done" : abort.signal.aborted ? "stopped" : "failed";
      comparison.message = error.message;
    }
    const got = texts.reasoning + texts.content;
    comparison.difference = firstDifference(wanted, enough() ? got.slice(0, wanted.length) : got);
    this.panel.refresh();
    if (this.comparing !== abort) return;
    this.comparing = null;
    this.#notify();
  }
}
