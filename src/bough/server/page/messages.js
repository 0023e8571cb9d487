// DOM elements of messages and their controls.

import { MarkdownView } from "./markdown.js";
import { pictureElements } from "./pictures.js";

export function element(name, options = {}, ...children) {
  const { dataset = {}, ...properties } = options;
  const made = Object.assign(document.createElement(name), properties);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

function button(action, text, extra = {}) {
  return element("button", { type: "button", className: "text", dataset: { action }, ...extra }, text);
}

const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Returns the line of statistics below an answer. */
export function statsInWords(stats) {
  const parts = [];
  const speed = stats.decode_tok_s || stats.tok_s;
  if (speed) parts.push(`${number(speed, speed < 100 ? 1 : 0)} tokens a second`);
  if (stats.acceptance_length > 1) parts.push(`${number(stats.acceptance_length, 2)} a step`);
  if (stats.generated_tokens) parts.push(`${number(stats.generated_tokens)} tokens`);
  if (stats.ttft_s) parts.push(`first after ${number(stats.ttft_s, 2)} s`);
  parts.push(...(stats.approximate ?? []));
  return parts.join(" · ");
}

const STATES = {
  stopped: "Stopped. The text received so far is kept.",
  length: "Cut at the length limit. Raise “Most tokens” in Settings for more.",
};

export class MessageView {
  /** `message` is read again at each refresh(). */
  constructor(message) {
    this.message = message;
    this.body = element("div", { className: "body" });
    this.foot = element("div", { className: "foot" });
    this.root = element("article", { className: `message ${message.role}` }, this.body, this.foot);
    this.root.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    this.editing = false;
    this.refresh();
  }

  refresh() {
    if (this.editing) return;
    if (this.message.role === "user") this.#refreshUser();
    else this.#refreshAnswer();
  }

  #refreshUser() {
    const { content, images } = this.message;
    this.body.replaceChildren();
    if (images?.length) this.body.append(element("div", { className: "pictures" }, ...pictureElements(images)));
    if (content) this.body.append(element("div", { className: "bubble" }, content));
    this.foot.replaceChildren(button("edit", "Edit"), button("copy", "Copy"));
  }

  #refreshAnswer() {
    const { message } = this;
    const writing = message.state === "writing";
    this.root.setAttribute("aria-busy", String(writing));
    if (message.reasoning && !this.thought) this.#addThought();
    if (this.thought) {
      this.thoughtText.textContent = message.reasoning;
      this.thoughtTitle.textContent = writing && !message.content ? "Thinking…" : "Thought";
    }
    if (message.content && !this.markdown) {
      const host = element("div", { className: "prose" });
      this.body.append(host);
      this.markdown = new MarkdownView(host);
    }
    this.markdown?.update(message.content);
    this.root.classList.toggle("writing", writing);
    this.root.classList.toggle("waiting", writing && !message.content && !message.reasoning);
    this.#refreshFoot(writing);
  }

  #addThought() {
    this.thoughtTitle = element("summary");
    this.thoughtText = element("div", { className: "thought-text" });
    this.thought = element("details", { className: "thought" }, this.thoughtTitle, this.thoughtText);
    this.body.prepend(this.thought);
  }

  #refreshFoot(writing) {
    const { message } = this;
    if (writing) {
      if (this.foot.childElementCount) this.foot.replaceChildren();
      return;
    }
    const parts = [];
    if (message.error) parts.push(this.#errorNotice());
    const note = STATES[message.state] ?? message.note;
    if (note && !message.error) parts.push(element("p", { className: "note" }, note));
    const controls = element("div", { className: "controls" }, button("regenerate", message.error ? "Try again" : "Regenerate"));
    if (message.content) controls.prepend(button("copy", "Copy"));
    if (message.stats) controls.append(element("span", { className: "stats" }, statsInWords(message.stats)));
    this.foot.replaceChildren(...parts, controls);
  }

  #errorNotice() {
    const notice = element("div", { className: "notice" }, element("strong", {}, this.message.error.message));
    notice.setAttribute("role", "alert");
    if (this.message.error.hint) notice.append(" ", this.message.error.hint);
    return notice;
  }

  /** Makes a user message editable; calls `onSave(text)` when it is sent, nothing when it is cancelled. */
  edit(onSave) {
    this.editing = true;
    const field = element("textarea", { value: this.message.content, rows: Math.min(12, this.message.content.split("\n").length + 1) });
    field.setAttribute("aria-label", "Edit message");
    const close = () => {
      this.editing = false;
      this.refresh();
      this.foot.querySelector("button")?.focus();
    };
    const save = () => {
      if (!field.value.trim() && !this.message.images?.length) return;
      this.editing = false;
      onSave(field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    const cancel = button("", "Cancel", { onclick: close });
    const send = element("button", { type: "button", className: "primary", onclick: save }, "Send");
    this.body.replaceChildren(element("div", { className: "edit" }, field, element("div", { className: "edit-foot" }, cancel, send)));
    this.foot.replaceChildren();
    field.focus();
  }
}
