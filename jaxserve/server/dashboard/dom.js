// DOM elements. Strings of the server always become text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Returns an HTML element with attributes and children. Strings become text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns an SVG element with attributes and children. Strings become text. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Appends any number of nodes, of which a call could not take them all as arguments, and returns the element. */
export function appendAll(node, children) {
  for (const child of children) node.append(child);
  return node;
}

/** Sets an element's text only if it changes, so that a selection or announcement is not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Shows a quantity as a number and its unit. */
export function setQuantity(node, [number, unit]) {
  const text = unit ? `${number} ${unit}` : number;
  if (node.dataset.shown === text) return;
  node.dataset.shown = text;
  node.replaceChildren(number, unit ? element("span", { class: "unit" }, ` ${unit}`) : "");
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
