// The chat page: connects the conversation, its storage, the composer, the settings and the panel beside it.

import { byId, element, setText } from "../dashboard/dom.js";
import { fill, newAnswer } from "./answer.js";
import { getJson, inWords, key } from "./api.js";
import { viewOf } from "./message.js";
import { SettingsDialog, withDefaults } from "./settings.js";
import { Side } from "./side.js";
import * as store from "./store.js";

const MAX_ANNOUNCED = 3000; // characters of an answer that a screen reader is given
const SAVE_EVERY = 1000; // ms between two savings of an answer in progress
const RETRY_MODEL = 2000; // ms between two questions for the model while it is loading
const NEAR_END = 80; // px from the end of the log within which it follows an answer
const MAX_SHARE = 0.25; // of the time, for rendering
const LEFT = "The page was closed before this answer was complete.";

const log = byId("log");
const input = byId("input");
const state = {
  capabilities: null, // of the model, once they are known
  model: "",
  conversation: null,
  views: [],
  abort: null, // of the answer in progress
  editing: false,
  saved: 0, // when the conversation was
  left: false, // the page was closed while an answer was in progress
};
const settings = new SettingsDialog(withDefaults(store.readSettings()), (values) => {
  store.keepSettings(values);
  useMode();
});

// -- the model

/** Asks the server for its model until it answers. */
async function loadModel() {
  clearTimeout(state.timer);
  try {
    const { data } = await getJson("v1/models");
    showModels(data);
  } catch (error) {
    if (error.status === 401) {
      askForKey(key.get() !== null);
      return;
    }
    notice(error.status === 503 ? "The model is still loading. You can write already." : `${inWords(error)} Trying again.`);
    state.timer = setTimeout(loadModel, RETRY_MODEL);
  }
}

function showModels(models) {
  notice("");
  byId("key-form").hidden = true;
  byId("forget-key").hidden = key.get() === null;
  const names = models.map(({ id }) => id);
  if (!names.includes(state.model)) state.model = names[0];
  byId("model-name").hidden = names.length > 1;
  byId("model").hidden = names.length < 2;
  byId("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  byId("model").value = state.model;
  setText(byId("model-name"), state.model);
  document.title = `${state.model} · jaxserve`;
  state.capabilities = models[0].capabilities ?? ["text", "chat"];
  useMode();
}

function askForKey(wrong) {
  notice("");
  byId("key-form").hidden = false;
  setText(byId("key-error"), wrong ? "The server did not accept this key." : "");
  byId("key").focus();
}

function notice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = text === "";
}

/** Returns how the model is used: in a conversation, or to go on with a text. */
function wantedMode() {
  const { capabilities, conversation } = state;
  if (settings.settings.mode) return settings.settings.mode;
  if (capabilities === null) return conversation?.mode ?? "chat";
  return capabilities.includes("chat") ? "chat" : "text";
}

/** Adapts the page to the mode. A conversation in another one is left, if it has begun. */
function useMode() {
  const mode = wantedMode();
  if (state.conversation.mode !== mode && !state.abort) {
    if (state.conversation.messages.length) open(store.newConversation(mode));
    else state.conversation.mode = mode;
  }
  const capabilities = state.capabilities ?? [];
  settings.adapt(capabilities, state.conversation.mode);
  document.body.dataset.mode = state.conversation.mode;
  const why = state.capabilities && !capabilities.includes("chat") && !settings.settings.mode;
  const lines = { text: why ? "This model has no chat template, so it goes on with your text." : "The model goes on with your text." };
  setText(byId("mode"), state.capabilities?.length === 0 ? "This model has no tokenizer: it takes token ids only." : (lines[mode] ?? ""));
  input.placeholder = mode === "text" ? "Begin a text" : "Write a message";
  byId("send").setAttribute("aria-label", mode === "text" ? "Complete" : "Send");
  drawAll();
}

// -- the conversation

function open(conversation) {
  state.abort?.abort();
  state.abort = null;
  state.conversation = conversation;
  store.choose(conversation.id);
  for (const message of conversation.messages) {
    if (["waiting", "thinking", "writing"].includes(message.state)) Object.assign(message, { state: "stopped", error: LEFT });
  }
  endEditing();
  state.views.forEach(({ view }) => view.node.remove());
  state.views = [];
  drawAll();
  log.scrollTop = log.scrollHeight;
}

/** Makes the views agree with the messages. Those of messages that are as before stay. */
function drawAll() {
  const { messages, mode } = state.conversation;
  messages.forEach((message, i) => {
    if (state.views[i]?.message === message) return;
    while (state.views.length > i) state.views.pop().view.node.remove();
    const view = viewOf(message, mode, {
      edit: () => edit(i),
      again: () => again(i),
      more: () => more(i),
      results: (texts) => sendResults(i, texts),
    });
    byId("messages").append(view.node);
    state.views.push({ message, view });
  });
  while (state.views.length > messages.length) state.views.pop().view.node.remove();
  const lastOf = (role) => messages.findLastIndex((message) => message.role === role);
  state.views.forEach(({ message, view }, i) => {
    const last = message.role === "user" ? i === lastOf("user") && !state.abort : i === messages.length - 1;
    view.draw({ last, busy: state.abort !== null });
  });
  byId("welcome").hidden = messages.length > 0;
  const busy = state.abort !== null;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("messages").setAttribute("aria-busy", String(busy));
}

function save(conversation = state.conversation) {
  state.saved = performance.now();
  byId("unsaved").hidden = store.keep(conversation);
}

async function send(text) {
  const { conversation } = state;
  if (state.abort) return;
  if (state.editing !== false) conversation.messages.length = state.editing;
  endEditing();
  if (text) conversation.messages.push({ role: "user", content: text });
  await answer();
}

/** Lets the model answer what is there. With `onto`, it goes on with that answer. */
async function answer(onto = null) {
  const { conversation } = state;
  const abort = (state.abort = new AbortController());
  const request = { mode: conversation.mode, model: state.model, settings: settings.settings, signal: abort.signal, onto };
  request.messages = [...conversation.messages];
  const message = onto ?? newAnswer(state.model);
  if (!onto) conversation.messages.push(message);
  delete message.error;
  Object.assign(message, { state: "waiting", stats: {} });
  follow(true);
  drawAll();
  log.scrollTop = log.scrollHeight;
  save();
  try {
    await fill(message, request, () => changed(message));
  } catch (error) {
    if (state.left) return; // the browser ends the request, which the server did not refuse
    message.state = "stopped";
    if (!abort.signal.aborted) message.error = inWords(error);
    if ([401, 404].includes(error.status)) loadModel(); // another key or another name
  }
  save(conversation);
  if (state.abort !== abort) return; // another conversation has been opened
  state.abort = null;
  side.answer(message.stats.rate);
  const following = isNearEnd();
  useMode();
  if (following) log.scrollTop = log.scrollHeight;
  announce(message);
}

function announce({ content, calls, error }) {
  const called = calls.map(({ name }) => `Calls ${name}.`).join(" ");
  const text = content.length > MAX_ANNOUNCED ? `${content.slice(0, MAX_ANNOUNCED)} … The answer is longer.` : content;
  setText(byId("said"), error ? "" : `Answer: ${text} ${called}`);
}

function stop() {
  state.abort?.abort();
}

function again(i) {
  const { messages } = state.conversation;
  messages.length = messages.findLastIndex((message, at) => at <= i && message.role !== "assistant") + 1;
  answer();
}

function more(i) {
  answer(state.conversation.messages[i]);
}

function sendResults(i, texts) {
  const { messages } = state.conversation;
  const results = messages[i].calls.map(({ id, name }, at) => ({ role: "tool", id, name, content: texts[at] }));
  messages.push(...results);
  answer();
}

function edit(i) {
  state.editing = i;
  input.value = state.conversation.messages[i].content;
  byId("editing").hidden = false;
  resize();
  input.focus();
}

function endEditing() {
  if (state.editing !== false) input.value = "";
  state.editing = false;
  byId("editing").hidden = true;
  resize();
}

// -- drawing an answer in progress: at most once per frame, and rarely if that takes long

let frame = null;
let idleUntil = 0;

function changed(message) {
  if (performance.now() - state.saved > SAVE_EVERY) save();
  if (frame !== null) return;
  frame = requestAnimationFrame(function draw() {
    if (performance.now() < idleUntil) {
      frame = requestAnimationFrame(draw);
      return;
    }
    frame = null;
    const began = performance.now();
    const view = state.views.at(-1);
    if (view?.message !== message || !state.abort) return;
    const following = isNearEnd();
    view.view.draw({ last: true, busy: true });
    if (following) log.scrollTop = log.scrollHeight;
    side.answer(message.stats.rate);
    const took = performance.now() - began;
    idleUntil = performance.now() + took * (1 / MAX_SHARE - 1);
  });
}

const isNearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;

function follow(wanted) {
  byId("to-end").hidden = wanted || isNearEnd();
}

// -- the composer

function resize() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function submit() {
  const { conversation } = state;
  const goesOn = conversation.mode === "text" && conversation.messages.length > 0;
  const text = conversation.mode === "text" ? input.value : input.value.trim();
  if (state.abort || !(text.trim() || goesOn)) return;
  input.value = "";
  resize();
  send(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("input", resize);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (state.abort) stop();
  else if (state.editing !== false) endEditing();
});
byId("stop").addEventListener("click", () => {
  stop();
  input.focus();
});
byId("cancel-edit").addEventListener("click", () => {
  endEditing();
  input.focus();
});
log.addEventListener("scroll", () => follow(false), { passive: true });
byId("to-end").addEventListener("click", () => (log.scrollTop = log.scrollHeight));
for (const suggestion of document.querySelectorAll(".suggestion")) {
  suggestion.addEventListener("click", () => send(suggestion.textContent));
}

// -- the bar at the top

byId("new").addEventListener("click", () => {
  open(store.newConversation(wantedMode()));
  input.focus();
});
byId("model").addEventListener("change", (event) => {
  state.model = event.target.value;
  document.title = `${state.model} · jaxserve`;
});
byId("open-settings").addEventListener("click", () => settings.open());
byId("open-history").addEventListener("click", () => {
  showHistory();
  byId("history").showModal();
});

function showHistory() {
  const rows = store.conversations().map((conversation) => {
    const title = element("button", { type: "button", class: "title", dir: "auto" }, store.titleOf(conversation));
    title.addEventListener("click", () => {
      if (conversation.id !== state.conversation.id) open(conversation);
      byId("history").close();
    });
    const remove = element("button", { type: "button", class: "plain small", "aria-label": `Delete ${store.titleOf(conversation)}` }, "Delete");
    remove.addEventListener("click", () => {
      store.forget(conversation.id);
      if (conversation.id === state.conversation.id) open(store.newConversation(wantedMode()));
      showHistory();
    });
    return element("li", {}, title, remove);
  });
  byId("history-list").replaceChildren(...rows);
  byId("history-empty").hidden = rows.length > 0;
}

// -- keys, other tabs, the end of the page

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  loadModel();
  input.focus();
});
byId("forget-key").addEventListener("click", () => {
  key.forget();
  byId("forget-key").hidden = true;
  loadModel();
});
addEventListener("storage", (event) => {
  if (state.abort || !store.isKeyOf(event.key, state.conversation.id)) return;
  const changed = store.conversation(state.conversation.id);
  if (changed && JSON.stringify(changed) !== JSON.stringify(state.conversation)) showOther(changed);
});

/** Shows this conversation as another tab has changed it. */
function showOther(conversation) {
  state.conversation = conversation;
  const following = isNearEnd();
  drawAll();
  if (following) log.scrollTop = log.scrollHeight;
}
addEventListener("pagehide", () => {
  state.left = state.abort !== null;
  if (state.left) save();
});

const side = new Side(loadModel);
const wide = matchMedia("(min-width: 1000px)");
const place = () => (byId("side").open = wide.matches);
wide.addEventListener("change", place);
place();
open(store.current() ?? store.newConversation(wantedMode()));
loadModel();
input.focus();
