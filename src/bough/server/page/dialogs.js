// The settings, chats and key dialogs.

import { element } from "./messages.js";
import { loadPictures } from "./pictures.js";
import { DEFAULTS, chats, key } from "./store.js";

const $ = (id) => document.getElementById(id);
const TEXT_FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "max_tokens", "seed"];

/** Shows the values that empty fields have, as the server says. */
export function showDefaults(sampling) {
  const form = $("settings-form");
  for (const [name, value] of Object.entries(sampling)) if (form.elements[name]) form.elements[name].placeholder = String(value);
}

function showBudget(form) {
  const value = Number(form.elements.budget_range.value);
  const words = value < 0 ? "automatic" : value === 0 ? "plain" : String(value);
  $("budget-value").textContent = words;
  form.elements.budget_range.setAttribute("aria-valuetext", words);
}

function fill(form, values) {
  for (const name of TEXT_FIELDS) {
    form.elements[name].value = values[name];
    isValid(form.elements[name]);
  }
  form.elements.thinking.value = values.thinking;
  form.elements.budget_range.value = values.budget === "" ? -1 : values.budget;
  form.elements.key.value = key.load();
  showBudget(form);
}

/** Returns whether a field's value can be used; says below it why not. */
function isValid(field) {
  const { min, max, type, validity } = field;
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  const note = field.parentElement.querySelector(".wrong");
  if (note) note.textContent = validity.valid || type !== "number" ? "" : `Needs a number ${range}; the last value is used.`;
  field.setAttribute("aria-invalid", String(!validity.valid));
  return validity.valid;
}

/** Connects the settings form; every change calls `onChange(values)` at once. */
export function connectSettings(current, onChange) {
  const form = $("settings-form");
  const dialog = $("settings-dialog");
  const changed = () => {
    const values = { thinking: form.elements.thinking.value };
    // An invalid number stays in the field, with what is wrong below it, and the last valid value stays in effect.
    for (const name of TEXT_FIELDS) if (isValid(form.elements[name])) values[name] = form.elements[name].value;
    const budget = Number(form.elements.budget_range.value);
    values.budget = budget < 0 ? "" : budget;
    key.save(form.elements.key.value.trim());
    showBudget(form);
    onChange(values);
  };
  form.addEventListener("input", changed);
  $("open-settings").addEventListener("click", () => {
    fill(form, current());
    dialog.showModal();
  });
  $("reset-settings").addEventListener("click", () => {
    const values = Object.fromEntries([...TEXT_FIELDS, "thinking", "budget"].map((name) => [name, DEFAULTS[name]]));
    fill(form, values);
    onChange(values);
  });
  form.setAttribute("novalidate", "");
  closeOnBackdrop(dialog);
}

function closeOnBackdrop(dialog) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

function ago(time) {
  const minutes = Math.round((Date.now() - time) / 60000);
  if (minutes < 1) return "just now";
  if (minutes < 60) return `${minutes} min ago`;
  if (minutes < 24 * 60) return `${Math.round(minutes / 60)} h ago`;
  return new Date(time).toLocaleDateString();
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Replaces a chat's button by a field for its name; Enter or leaving it keeps the name, Escape does not. */
function editName(open, chat, done) {
  const field = element("input", { className: "chat-name", value: chats.title(chat), maxLength: 200 });
  field.setAttribute("aria-label", "Name of the chat");
  let kept = true;
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    kept = event.key === "Enter";
    field.blur();
  });
  field.addEventListener("blur", () => done(kept ? field.value : null), { once: true });
  open.replaceWith(field);
  field.focus();
  field.select();
}

export function connectChats({ isOpen, onOpen, onRename, onRemove, getSystem }) {
  const dialog = $("chats-dialog");
  const list = () => {
    const rows = chats.list().map((chat) => {
      const open = element("button", { type: "button", className: "chat-open" }, element("span", {}, chats.title(chat)), element("small", {}, ago(chat.updated)));
      if (isOpen(chat)) open.setAttribute("aria-current", "true");
      open.addEventListener("click", () => {
        dialog.close();
        onOpen(chat);
      });
      const action = (text, run) => {
        const made = element("button", { type: "button", className: "text", onclick: run }, text);
        made.setAttribute("aria-label", `${text} chat: ${chats.title(chat)}`);
        return made;
      };
      const rename = action("Rename", () => editName(open, chat, (name) => {
        if (name !== null) onRename(chat, name);
        list();
      }));
      const save = action("Export", async () => {
        await loadPictures(chat.messages);
        download("chat.json", chats.exported(chat, getSystem()));
      });
      const remove = element("button", { type: "button", className: "text" }, "Delete");
      remove.setAttribute("aria-label", `Delete chat: ${chats.title(chat)}`);
      remove.addEventListener("click", () => {
        // The first click asks, the second one deletes; leaving the button takes the question back.
        if (remove.textContent === "Delete") {
          remove.textContent = "Really delete?";
          remove.setAttribute("aria-label", `Really delete chat: ${chats.title(chat)}?`);
          return;
        }
        chats.remove(chat.id);
        onRemove(chat);
        list();
      });
      remove.addEventListener("blur", () => {
        remove.textContent = "Delete";
        remove.setAttribute("aria-label", `Delete chat: ${chats.title(chat)}`);
      });
      return element("li", {}, open, rename, save, remove);
    });
    $("chat-list").replaceChildren(...(rows.length ? rows : [element("li", { className: "note" }, "No chats yet.")]));
  };
  $("open-chats").addEventListener("click", () => {
    list();
    dialog.showModal();
  });
  closeOnBackdrop(dialog);
}

/** Returns the key typed by the user, or null if they cancel. */
export function askForKey() {
  const dialog = $("key-dialog");
  const input = $("key-input");
  const wrong = Boolean(key.load());
  $("key-message").textContent = wrong
    ? "The saved key is wrong. Your message is kept and is sent once the key is right."
    : "Your message is kept and is sent once the key is right.";
  input.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    const cancel = () => dialog.close("");
    $("key-cancel").addEventListener("click", cancel);
    dialog.addEventListener("close", () => {
      $("key-cancel").removeEventListener("click", cancel);
      const value = dialog.returnValue === "use" ? input.value.trim() : "";
      dialog.returnValue = "";
      if (value) key.save(value);
      resolve(value || null);
    }, { once: true });
  });
}
