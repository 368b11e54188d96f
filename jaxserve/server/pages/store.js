// Conversations and settings in this browser's localStorage, each conversation under a key of its own.

const PREFIX = "jaxserve-chat-";
const SETTINGS = "jaxserve-settings";
const CURRENT = "jaxserve-chat"; // in sessionStorage: each tab has its own
const MAX_KEPT = 30; // conversations; older ones are forgotten

export const newConversation = (mode) => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, mode, messages: [], changed: 0 });

/** Returns a value of localStorage, or null if it is not there or not valid. */
function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

const isConversation = (value) =>
  typeof value?.id === "string" && Array.isArray(value.messages) && value.messages.every((message) => typeof message?.content === "string");

/** Returns all conversations, the latest first. */
export function conversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(read).filter(isConversation).sort((a, b) => b.changed - a.changed);
}

/** Returns this tab's conversation: that of before a reload, or the latest of this browser, or null. */
export function current() {
  const id = sessionStorage.getItem(CURRENT);
  return (id && conversation(id)) || (id ? null : (conversations()[0] ?? null));
}

export function conversation(id) {
  const found = read(PREFIX + id);
  return isConversation(found) ? found : null;
}

export const isKeyOf = (key, id) => key === PREFIX + id;
export const choose = (id) => sessionStorage.setItem(CURRENT, id);
export const forget = (id) => localStorage.removeItem(PREFIX + id);

/** Keeps a conversation. Returns whether there was room; the oldest ones make room for it. */
export function keep(conversation) {
  conversation.changed = Date.now();
  const others = conversations().filter(({ id }) => id !== conversation.id);
  for (const { id } of others.splice(MAX_KEPT - 1)) forget(id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      const oldest = others.pop();
      if (!oldest) return false;
      forget(oldest.id);
    }
  }
}

/** Returns the first words of a conversation. */
export const titleOf = ({ messages }) => messages[0]?.content.trim().slice(0, 80) || "New conversation";

export const readSettings = () => read(SETTINGS) ?? {};

export function keepSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // Without room they last as long as the page.
  }
}
