// Elements without markup: whatever comes from the server is text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets an element's text if it is another one, so that what is selected or announced is left alone. */
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
