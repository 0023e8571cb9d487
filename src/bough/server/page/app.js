// The page's buttons, keyboard shortcuts, scrolling and health checks.

import { getJson, health } from "./api.js";
import { Conversation } from "./conversation.js";
import { connectChats, connectSettings, showDefaults } from "./dialogs.js";
import { Panel } from "./panel.js";
import { PendingPictures, prunePictures, readPicture } from "./pictures.js";
import { chats, draft, key, settings as storedSettings, theme } from "./store.js";

const $ = (id) => document.getElementById(id);
const HEALTH_EVERY_MS = 10000;
const HEALTH_SOON_MS = 1500;
const BUILT_IN = "bough-40m";
// Pixels from the end within which the view follows new text.
const NEAR_END = 60;
// Characters of a message from which it is read while its end is typed, and the pause in typing before that.
const READ_AHEAD = 2000;
const PAUSE_MS = 600;
const LARGEST_FILE = 4 << 20;

const WITHOUT_TREES = {
  lookup: "This model has no draft. Each step proposes what followed the same words before, which helps where an answer repeats its question.",
  nothing: "Speculation is off: each step gives one token.",
};

const ABOUT_TREES = $("panel-about").textContent;

let settings = storedSettings.load();
let modelName = "";
let maxContext = 0;
let usedContext = 0;
let following = true;
let healthTimer = 0;
let triedKey = null;
let readTimer = 0;
let sees = true;

const panel = new Panel();
const pending = new PendingPictures($("pictures"), () => readSoon());
const conversation = new Conversation($("messages"), {
  panel,
  getSettings: () => settings,
  hooks: { onState: showState, onStatus: (text) => ($("status").textContent = text), onGrow: follow, onModel: () => modelName || "default", onContext: showContext },
});

/** Shows how much of the model's context the chat takes, where both are known. */
function showContext(tokens) {
  usedContext = tokens;
  $("context").hidden = !tokens || !maxContext;
  $("context-meter").max = maxContext;
  $("context-meter").value = tokens;
  $("context-text").textContent = `${tokens.toLocaleString("en")} of ${maxContext.toLocaleString("en")} tokens`;
}

/** Adds pictures to the message, and the text of other files, where it can be seen and shortened; lets the server read it. */
async function attach(files) {
  const parts = [];
  for (const file of files) {
    if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
      await attachPicture(file);
      continue;
    }
    const text = file.size > LARGEST_FILE ? null : await file.text();
    if (text === null || /\0|\uFFFD/.test(text)) {
      $("status").textContent = text === null ? `${file.name} has more than 4 MiB.` : `${file.name} is not a text file.`;
      continue;
    }
    let fence = "```";
    while (text.includes(fence)) fence += "`";
    parts.push(`${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n\n`);
  }
  setPrompt(parts.join("") + $("prompt").value);
  readSoon(0);
  $("prompt").focus();
}

async function attachPicture(file) {
  if (!sees) {
    $("status").textContent = "The model was loaded without its image encoder: it cannot see pictures.";
    return;
  }
  try {
    pending.add(await readPicture(file));
  } catch {
    $("status").textContent = `${file.name} is not a picture that this browser can show.`;
  }
}

function change(values) {
  settings = { ...settings, ...values };
  storedSettings.save(settings);
}

function showState(running, comparing) {
  $("send").hidden = running || comparing;
  $("stop").hidden = !(running || comparing);
  $("welcome").hidden = $("messages").childElementCount > 0;
  if (!running) checkHealth();
}

function follow() {
  $("welcome").hidden = true;
  if (following) $("scroll").scrollTop = $("scroll").scrollHeight;
  $("jump-latest").hidden = following;
}

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

function setPrompt(text) {
  $("prompt").value = text;
  draft.save(text);
  fitPrompt();
}

function readSoon(wait = PAUSE_MS) {
  clearTimeout(readTimer);
  const text = $("prompt").value;
  const { pictures } = pending;
  if (text.length < READ_AHEAD && !pictures.length) return conversation.stopReading();
  readTimer = setTimeout(() => conversation.running || conversation.readAhead(text, pictures), wait);
}

function submit() {
  const text = $("prompt").value;
  if ((!text.trim() && !pending.pictures.length) || conversation.abort) return;
  following = true;
  clearTimeout(readTimer);
  const sent = conversation.send(text, pending.take());
  // Clear the field only after the chat with this text is saved.
  setPrompt("");
  return sent;
}

async function copy(text, control) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain HTTP on other hosts than loopback has no clipboard API.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const before = control.textContent;
  control.textContent = "Copied";
  setTimeout(() => (control.textContent = before), 1200);
}

function onMessageClick(event) {
  const control = event.target.closest("button[data-action]");
  if (!control) return;
  const view = conversation.viewOf(control);
  const action = control.dataset.action;
  if (action === "copy-code") copy(control.closest(".code-block").querySelector("code").textContent, control);
  else if (action === "copy") copy(view.message.content, control);
  else if (action === "regenerate") {
    following = true;
    // The focused button is removed with the answer: move the focus first.
    $("scroll").focus({ preventScroll: true });
    conversation.regenerate(view);
  } else if (action === "edit") {
    view.edit((text) => {
      following = true;
      conversation.resend(view, text);
    });
  }
}

function onKey(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (conversation.running) conversation.stop();
    else if (document.body.classList.contains("panel-over")) showPanel(false);
  } else if (event.key === "/" && !event.ctrlKey && !event.metaKey && !/^(INPUT|TEXTAREA)$/.test(event.target.tagName)) {
    event.preventDefault();
    $("prompt").focus();
  }
}

const narrow = matchMedia("(max-width: 60rem)");

/** Shows the panel beside the chat on wide screens, over it on narrow ones. */
function showPanel(open, { save = true } = {}) {
  document.body.classList.toggle("panel-over", narrow.matches && open);
  document.body.classList.toggle("panel-beside", !narrow.matches && open);
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  if (!narrow.matches && save) change({ panel: open });
  panel.refresh();
}

function panelIsOpen() {
  return document.body.classList.contains("panel-over") || document.body.classList.contains("panel-beside");
}

async function checkHealth() {
  clearTimeout(healthTimer);
  let wait = HEALTH_EVERY_MS;
  const say = (state, text) => {
    $("health-dot").dataset.state = state;
    $("model-name").textContent = text;
    // The choice of models says the name; the server's state is said beside it.
    $("model-name").hidden = state === "ready" && !$("model-choice").hidden;
  };
  try {
    const state = await health();
    if (!state.ready) {
      wait = HEALTH_SOON_MS;
      say("loading", state.message || "The model is loading");
    } else {
      // A model that is loaded later says its context then.
      if (!modelName || !maxContext) await fetchModelName();
      say("ready", modelName || "Ready");
    }
  } catch {
    wait = HEALTH_SOON_MS * 2;
    say("gone", "Server not reachable");
  }
  clearTimeout(healthTimer);
  healthTimer = setTimeout(checkHealth, document.hidden ? HEALTH_EVERY_MS * 3 : wait);
}

/** Shows what the server says of the model: its sampling, and what proposes tokens. */
function describe(props) {
  showDefaults(props.sampling);
  const about = WITHOUT_TREES[props.proposes];
  $("panel-about").textContent = about ?? ABOUT_TREES;
  $("about-trees").hidden = $("panel-watch").hidden = $("sketch").hidden = Boolean(about);
  if (about && !narrow.matches && settings.panel === null) showPanel(false, { save: false });
}

/** Offers a choice where the server has several models. */
function showModels(models) {
  const choice = $("model-choice");
  choice.replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === modelName)));
  choice.hidden = models.length < 2;
}

async function fetchModelName() {
  // Do not retry a rejected key at every health check.
  if (triedKey === key.load()) return;
  try {
    const models = (await getJson("v1/models", { key: key.load() })).data ?? [];
    const chosen = models.find(({ id }) => id === settings.model) ?? models.find(({ loaded }) => loaded) ?? models[0];
    modelName = chosen?.id ?? "";
    maxContext = chosen?.max_model_len ?? 0;
    // Of a model that is not loaded the server does not know.
    sees = chosen?.architecture?.input_modalities?.includes("image") ?? true;
    showContext(usedContext);
    showModels(models);
    getJson("props", { key: key.load() }).then(describe, () => {});
    $("about-model").textContent = modelName === BUILT_IN
      ? `${modelName} is the small model that comes with Bough, for trying things out: it writes short code and short answers.`
      : modelName ? `The model is ${modelName}.` : "";
    document.title = modelName ? `${modelName} · Bough` : "Bough";
  } catch (error) {
    // Without a key the model name stays empty; the first message prompts for one.
    if (error.kind === "key") triedKey = key.load();
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("prompt").addEventListener("input", () => {
  draft.save($("prompt").value);
  fitPrompt();
  readSoon();
});
// Anywhere: a browser would leave the page for a file that is dropped beside the field.
document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
$("prompt").addEventListener("paste", (event) => {
  const images = [...event.clipboardData.files].filter(({ type }) => type.startsWith("image/"));
  // Programs put a picture of copied text beside it.
  if (!images.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attach(images);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", (event) => {
  conversation.stop();
  // Only after a key press: on a phone the focus would open the on-screen keyboard.
  if (event.detail === 0) $("prompt").focus();
});
$("messages").addEventListener("click", onMessageClick);
$("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  following = scrollHeight - scrollTop - clientHeight < NEAR_END;
  $("jump-latest").hidden = following;
});
$("jump-latest").addEventListener("click", () => {
  following = true;
  follow();
  $("prompt").focus();
});
$("welcome").addEventListener("click", (event) => {
  const suggestion = event.target.closest("button");
  if (!suggestion) return;
  setPrompt(suggestion.textContent);
  submit();
});
$("new-chat").addEventListener("click", () => {
  conversation.open(chats.create());
  following = true;
  $("prompt").focus();
});
$("toggle-panel").addEventListener("click", () => showPanel(!panelIsOpen()));
$("close-panel").addEventListener("click", () => {
  showPanel(false);
  $("toggle-panel").focus();
});
$("toggle-theme").addEventListener("click", () => {
  const dark = theme.load() ? theme.load() === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme.save(dark ? "light" : "dark");
});
$("compare").checked = settings.compare;
$("compare").addEventListener("change", () => {
  change({ compare: $("compare").checked });
  panel.refresh();
  if (settings.compare) conversation.compareLast();
  else conversation.stopComparing();
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await attach($("file").files);
  $("file").value = "";
});
$("model-choice").addEventListener("change", () => {
  change({ model: $("model-choice").value });
  modelName = "";
  checkHealth();
});
connectSettings(() => settings, change);
connectChats({
  isOpen: (chat) => chat.id === conversation.chat.id,
  onRename: (chat, name) => conversation.rename(chat, name),
  getSystem: () => settings.system,
  onOpen: (chat) => conversation.open(chat),
  onRemove: (chat) => chat.id === conversation.chat.id && conversation.discard(),
});
document.addEventListener("keydown", onKey);
narrow.addEventListener("change", () => showPanel(!narrow.matches && (settings.panel ?? true), { save: false }));
addEventListener("pagehide", () => chats.save(conversation.chat));
addEventListener("resize", fitPrompt);
document.addEventListener("visibilitychange", () => document.hidden || checkHealth());

prunePictures([...chats.list(), conversation.chat]);
showPanel(!narrow.matches && (settings.panel ?? true), { save: false });
setPrompt(draft.load());
follow();
showState(false, false);
$("prompt").focus();
