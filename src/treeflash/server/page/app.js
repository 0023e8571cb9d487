// The page's buttons, keyboard shortcuts, scrolling and health checks.

import { getJson, health } from "./api.js";
import { Conversation } from "./conversation.js";
import { connectChats, connectSettings } from "./dialogs.js";
import { Panel } from "./panel.js";
import { chats, draft, key, settings as storedSettings, theme } from "./store.js";

const $ = (id) => document.getElementById(id);
const HEALTH_EVERY_MS = 10000;
const HEALTH_SOON_MS = 1500;
const BUILT_IN = "treeflash-40m";
// Pixels from the end within which the view follows new text.
const NEAR_END = 60;

let settings = storedSettings.load();
let modelName = "";
let following = true;
let healthTimer = 0;
let triedKey = null;

const panel = new Panel();
const conversation = new Conversation($("messages"), {
  panel,
  getSettings: () => settings,
  hooks: { onState: showState, onStatus: (text) => ($("status").textContent = text), onGrow: follow, onModel: () => modelName || "default" },
});

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

function submit() {
  const text = $("prompt").value;
  if (!text.trim() || conversation.abort) return;
  following = true;
  const sent = conversation.send(text);
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
function showPanel(open) {
  document.body.classList.toggle("panel-over", narrow.matches && open);
  document.body.classList.toggle("panel-beside", !narrow.matches && open);
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  if (!narrow.matches) change({ panel: open });
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
  };
  try {
    const state = await health();
    if (!state.ready) {
      wait = HEALTH_SOON_MS;
      say("loading", state.message || "The model is loading");
    } else {
      if (!modelName) await fetchModelName();
      say("ready", modelName || "Ready");
    }
  } catch {
    wait = HEALTH_SOON_MS * 2;
    say("gone", "Server not reachable");
  }
  clearTimeout(healthTimer);
  healthTimer = setTimeout(checkHealth, document.hidden ? HEALTH_EVERY_MS * 3 : wait);
}

async function fetchModelName() {
  // Do not retry a rejected key at every health check.
  if (triedKey === key.load()) return;
  try {
    const models = await getJson("v1/models", { key: key.load() });
    modelName = models.data?.[0]?.id ?? "";
    $("about-model").textContent = modelName === BUILT_IN
      ? `${modelName} is the small model that comes with TreeFlash, for trying things out: it writes short code and short answers.`
      : modelName ? `The model is ${modelName}.` : "";
    document.title = modelName ? `${modelName} · TreeFlash` : "TreeFlash";
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
connectSettings(() => settings, change);
connectChats({
  onOpen: (chat) => conversation.open(chat),
  onRemove: (chat) => chat.id === conversation.chat.id && conversation.discard(),
});
document.addEventListener("keydown", onKey);
narrow.addEventListener("change", () => showPanel(!narrow.matches && settings.panel));
addEventListener("pagehide", () => chats.save(conversation.chat));
addEventListener("resize", fitPrompt);
document.addEventListener("visibilitychange", () => document.hidden || checkHealth());

showPanel(!narrow.matches && settings.panel);
setPrompt(draft.load());
follow();
showState(false, false);
$("prompt").focus();
