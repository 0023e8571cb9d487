// The settings, chats and key dialogs; knows storage and the forms, not the conversation on screen.

import { element } from "./messages.js";
import { DEFAULTS, chats, key } from "./store.js";

const $ = (id) => document.getElementById(id);
const TEXT_FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];

function showBudget(form) {
  const value = Number(form.elements.budget_range.value);
  const words = value < 0 ? "automatic" : value === 0 ? "plain" : String(value);
  $("budget-value").textContent = words;
  form.elements.budget_range.setAttribute("aria-valuetext", words);
}

function fill(form, values) {
  for (const name of TEXT_FIELDS) form.elements[name].value = values[name];
  form.elements.thinking.value = values.thinking;
  form.elements.budget_range.value = values.budget === "" ? -1 : values.budget;
  form.elements.key.value = key.load();
  showBudget(form);
}

/** Every change counts at once; `onChange(values)` hears the settings that differ from the page's others. */
export function connectSettings(current, onChange) {
  const form = $("settings-form");
  const dialog = $("settings-dialog");
  const changed = () => {
    const values = { thinking: form.elements.thinking.value };
    // An impossible number stays in the field, marked, and the last possible one stays in force.
    for (const name of TEXT_FIELDS) if (form.elements[name].validity.valid) values[name] = form.elements[name].value;
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

export function connectChats({ onOpen, onRemove }) {
  const dialog = $("chats-dialog");
  const list = () => {
    const kept = chats.list();
    const rows = kept.map((chat) => {
      const open = element("button", { type: "button", className: "chat-open" }, element("span", {}, chats.title(chat)), element("small", {}, ago(chat.updated)));
      open.addEventListener("click", () => {
        dialog.close();
        onOpen(chat);
      });
      const remove = element("button", { type: "button", className: "text" }, "Delete");
      remove.setAttribute("aria-label", `Delete chat: ${chats.title(chat)}`);
      remove.addEventListener("click", () => {
        chats.remove(chat.id);
        onRemove(chat);
        list();
      });
      return element("li", {}, open, remove);
    });
    $("chat-list").replaceChildren(...(rows.length ? rows : [element("li", { className: "note" }, "No chats yet.")]));
  };
  $("open-chats").addEventListener("click", () => {
    list();
    dialog.showModal();
  });
  closeOnBackdrop(dialog);
}

/** The key typed by the user, or null when they would rather not. */
export function askForKey() {
  const dialog = $("key-dialog");
  const input = $("key-input");
  const wrong = Boolean(key.load());
  $("key-message").textContent = wrong
    ? "The key kept here is not the server’s. Your message is kept and goes out once the key is right."
    : "Your message is kept and goes out once the key is right.";
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
