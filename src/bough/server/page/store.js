// Settings, chats and the key in the browser's storage.

import { withPictures } from "./pictures.js";

const PREFIX = "bough.";
const MAX_CHATS = 50;

export const DEFAULTS = Object.freeze({
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  repetition_penalty: "",
  presence_penalty: "",
  max_tokens: "",
  seed: "",
  budget: "",
  thinking: "own",
  model: "",
  compare: false,
  panel: null, // open where trees are drafted, until the user says
});

function read(key, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Returns whether the value was stored: storage can be full or blocked. */
function write(key, value) {
  try {
    localStorage.setItem(PREFIX + key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function remove(key) {
  try {
    localStorage.removeItem(PREFIX + key);
  } catch {
    // Storage is blocked, so there is nothing to remove.
  }
}

export const settings = {
  load: () => ({ ...DEFAULTS, ...read("settings", {}) }),
  save: (values) => write("settings", values),
};

export const key = {
  load: () => read("key", ""),
  save: (value) => (value ? write("key", value) : remove("key")),
};

/** The unsent text of the message field. */
export const draft = {
  load: () => read("draft", ""),
  save: (value) => (value ? write("draft", value) : remove("draft")),
};

export const theme = {
  load: () => document.documentElement.dataset.theme ?? "",
  save(value) {
    // Plain text, not JSON: theme.js reads it before any module.
    try {
      localStorage.setItem(PREFIX + "theme", value);
    } catch {
      // Storage is blocked: the choice lasts until the page is closed.
    }
    document.documentElement.dataset.theme = value;
  },
};

// One entry per chat, so that two tabs do not overwrite each other's.
export const chats = {
  create: () => ({ id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, updated: Date.now(), messages: [] }),

  list() {
    const found = [];
    try {
      for (const name of Object.keys(localStorage)) {
        if (!name.startsWith(`${PREFIX}chat.`)) continue;
        const chat = read(name.slice(PREFIX.length), null);
        if (chat?.messages?.length) found.push(chat);
      }
    } catch {
      return [];
    }
    return found.sort((a, b) => b.updated - a.updated);
  },

  /** Removes the oldest chats when storage is full. */
  save(chat) {
    if (!chat.messages.length) return true;
    const older = this.list().filter((other) => other.id !== chat.id);
    for (const extra of older.splice(MAX_CHATS - 1)) this.remove(extra.id);
    while (!write(`chat.${chat.id}`, chat)) {
      const oldest = older.pop();
      if (!oldest) return false;
      this.remove(oldest.id);
    }
    return true;
  },

  remove: (id) => remove(`chat.${id}`),

  /** Returns the chat that this tab had open; null in a new tab. */
  reopen() {
    try {
      const id = sessionStorage.getItem(`${PREFIX}open`);
      return (id && read(`chat.${id}`, null)) || null;
    } catch {
      return null;
    }
  },

  opened(chat) {
    try {
      sessionStorage.setItem(`${PREFIX}open`, chat.id);
    } catch {
      // Storage is blocked: the next load starts a new chat.
    }
  },

  title: (chat) => chat.name || (chat.messages.find((message) => message.role === "user" && message.content)?.content ?? (chat.messages.length ? "Picture" : "Empty chat")).trim().split("\n")[0],

  /** Returns a chat as JSON that `bough chat` can load. */
  exported(chat, system) {
    const messages = chat.messages.map((message) => ({ role: message.role, content: withPictures(message), ...(message.reasoning ? { reasoning_content: message.reasoning } : {}) }));
    return JSON.stringify({ system: system.trim() ? system : null, messages }, null, 1);
  },
};
