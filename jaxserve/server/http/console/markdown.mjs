// Markdown as elements. marked's lexer reads it (marked.mjs is lib/marked.esm.js of marked 18.2.1,
// unchanged), and each kind of token is made an element here. No text is ever read as HTML: a tag
// that a model writes is shown as it is written.
import { lexer } from "./marked.mjs";

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const WRAPPED = { strong: "strong", em: "em", del: "del", blockquote: "blockquote", paragraph: "p" };
const DEEPEST = 60; // elements in each other, which browsers lay out one within the other

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The address, if a link may lead there; else null.
export function address(href) {
  try {
    const found = new URL(href);
    return ["http:", "https:", "mailto:"].includes(found.protocol) ? found.href : null;
  } catch { return null; }
}

export function unescaped(text) {
  return text.replace(/&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|(\w+));/gi, (whole, hex, decimal, name) => {
    if (name) return ENTITIES[name.toLowerCase()] ?? whole;
    const code = hex ? parseInt(hex, 16) : Number(decimal);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(token, children) {
  const href = address(token.href);
  if (href === null) return [token.raw];
  return [element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children)];
}

function cell(tag, token, depth) {
  const made = element(tag, {}, ...nodes(token.tokens, depth));
  if (token.align) made.className = token.align;
  return made;
}

function code(token) {
  const copied = () => token.text;
  return element("div", { className: "code" },
    element("div", { className: "code-head" }, element("span", {}, token.lang || "code"), copier(copied)),
    element("pre", { tabIndex: 0 }, element("code", {}, token.text)));
}

// Browsers have a clipboard only for pages that come by TLS, or from this machine.
export function copier(text) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Copy" });
  button.hidden = !globalThis.navigator?.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

function node(token, depth = 0) {
  if (depth > DEEPEST) return [token.raw];
  const inner = () => nodes(token.tokens ?? [], depth + 1);
  if (token.type in WRAPPED) return [element(WRAPPED[token.type], {}, ...inner())];
  switch (token.type) {
    case "space": case "def": return [];
    case "text": return token.tokens ? inner() : [unescaped(token.text)];
    case "escape": return [token.text];
    case "codespan": return [element("code", {}, token.text)];
    case "br": return [element("br")];
    case "hr": return [element("hr")];
    case "checkbox": return [element("input", { type: "checkbox", checked: token.checked, disabled: true }), " "];
    case "heading": return [element("h" + Math.min(token.depth + 2, 6), {}, ...inner())];
    case "code": return [code(token)];
    case "link": return link(token, inner());
    case "image": return link(token, [token.text || token.href]); // nothing is loaded from elsewhere
    case "list": {
      const list = element(token.ordered ? "ol" : "ul", {}, ...token.items.map((item) => element("li", {}, ...nodes(item.tokens, depth + 1))));
      if (token.ordered && token.start !== 1) list.start = token.start;
      return [list];
    }
    case "table": {
      const head = element("thead", {}, element("tr", {}, ...token.header.map((each) => cell("th", each, depth + 1))));
      const rows = token.rows.map((row) => element("tr", {}, ...row.map((each) => cell("td", each, depth + 1))));
      return [element("div", { className: "table" }, element("table", {}, head, element("tbody", {}, ...rows)))];
    }
    default: return [token.raw]; // html, and whatever else there may be
  }
}

const nodes = (tokens, depth) => tokens.flatMap((token) => node(token, depth));

function blocks(text) {
  try { return lexer(text, { gfm: true, breaks: true }); } catch { return [{ type: "plain", raw: text }]; } // nested too deeply
}

// Shows the text of a stream, and keeps the blocks that are as they were: what is selected stays so.
export class Markdown {
  #shown = [];

  constructor(into) { this.into = into; }

  show(text) {
    const found = blocks(text).filter((token) => token.type !== "space");
    let same = 0;
    while (same < found.length && this.#shown[same]?.raw === found[same].raw) same++;
    for (const { parts } of this.#shown.splice(same)) for (const part of parts) part.remove();
    for (const token of found.slice(same)) {
      const parts = node(token).map((part) => typeof part === "string" ? element("p", {}, part) : part);
      this.into.append(...parts);
      this.#shown.push({ raw: token.raw, parts });
    }
  }
}
