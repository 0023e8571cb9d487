// Pictures of messages: read from files, kept in this browser's database, shown small. Chats hold their ids.

import { element } from "./messages.js";

// What the server keeps of a picture: 4096 tokens of 32 x 32 pixels.
const MOST_PIXELS = 4096 * 32 * 32;
const SENT = ["image/jpeg", "image/png", "image/webp", "image/gif"];
const MOST_BYTES = 12 << 20;

const urls = new Map();
let database = null;

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Runs `use(store)` in a transaction; returns undefined where the browser keeps nothing, as in private windows. */
async function inStore(mode, use) {
  try {
    if (!database) {
      const opening = indexedDB.open("bough", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("pictures");
      database = done(opening);
    }
    return await use((await database).transaction("pictures", mode).objectStore("pictures"));
  } catch {
    return undefined;
  }
}

function asUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Returns the file, or a smaller copy of a picture that the server would shrink or cannot read. */
async function sendable(file, bitmap) {
  const pixels = bitmap.width * bitmap.height;
  if (pixels <= MOST_PIXELS && file.size <= MOST_BYTES && SENT.includes(file.type)) return file;
  const share = Math.min(1, Math.sqrt(MOST_PIXELS / pixels));
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * share)), height: Math.max(1, Math.round(bitmap.height * share)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
}

/** Returns {id, name} of a picture; throws if the browser cannot show the file. */
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 10)}`;
  urls.set(id, await asUrl(await sendable(file, bitmap)));
  bitmap.close();
  return { id, name: file.name || "Picture" };
}

/** Keeps the pictures of a message for later visits. */
export function keepPictures(pictures) {
  return inStore("readwrite", (store) => Promise.all(pictures.map(({ id }) => urls.has(id) && done(store.put(urls.get(id), id)))));
}

/** Makes the pictures of a chat known; returns null where there is nothing to wait for. */
export function loadPictures(messages) {
  const missing = messages.flatMap(({ images = [] }) => images).filter(({ id }) => !urls.has(id));
  if (!missing.length) return null;
  return inStore("readonly", (store) => Promise.all(missing.map(async ({ id }) => {
    const url = await done(store.get(id));
    if (url) urls.set(id, url);
  })));
}

/** Removes the pictures that no chat has. */
export function prunePictures(chats) {
  const used = new Set(chats.flatMap(({ messages }) => messages).flatMap(({ images = [] }) => images).map(({ id }) => id));
  return inStore("readwrite", async (store) => {
    for (const id of await done(store.getAllKeys())) if (!used.has(id)) store.delete(id);
  });
}

/** Returns a message's content for a request: its text, or parts where it has pictures. */
export function withPictures({ content, images = [] }) {
  const known = images.filter(({ id }) => urls.has(id));
  if (!known.length) return content;
  const parts = known.map(({ id }) => ({ type: "image_url", image_url: { url: urls.get(id) } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** Returns the elements of a message's pictures. */
export function pictureElements(images = []) {
  return images.map(({ id, name }) => urls.has(id)
    ? element("img", { src: urls.get(id), alt: name, title: name })
    : element("span", { className: "note" }, `${name} is no longer in this browser.`));
}

/** The pictures of the next message, above its text, each with a button that removes it. */
export class PendingPictures {
  constructor(host, onChange) {
    this.host = host;
    this.onChange = onChange;
    this.pictures = [];
  }

  add(picture) {
    this.pictures.push(picture);
    this.#refresh();
  }

  /** Returns the pictures and forgets them. */
  take() {
    const taken = this.pictures;
    this.pictures = [];
    this.#refresh();
    return taken;
  }

  #refresh() {
    this.host.hidden = !this.pictures.length;
    this.host.replaceChildren(...this.pictures.map((picture) => {
      const cross = document.querySelector("#close-panel svg").cloneNode(true);
      const remove = element("button", { type: "button", title: "Remove" }, cross);
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      remove.addEventListener("click", () => {
        this.pictures = this.pictures.filter(({ id }) => id !== picture.id);
        this.#refresh();
        this.onChange();
      });
      return element("figure", {}, ...pictureElements([picture]), remove);
    }));
  }
}
