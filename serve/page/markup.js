"use strict";
// A model's Markdown with TeX and code, as HTML that cannot act: no raw HTML, no images, no scripts, no remote loads.

const escapeHtml = (text) =>
  text.replace(/[&<>"']/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[char]);

const texRules = [
  { level: "block", start: /\$\$|\\\[/, match: /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/, display: true },
  { level: "inline", start: /\$|\\\(|\\\[/, match: /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])/, display: true },
  // One dollar opens TeX only next to a non-space and closes before a non-digit: "$5 and $6" are prices.
  { level: "inline", start: /\$|\\\(/, match: /^(?:\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/, display: false },
];

const texExtensions = texRules.map((rule, index) => ({
  name: `tex${index}`,
  level: rule.level,
  start: (source) => source.match(rule.start)?.index,
  tokenizer(source) {
    const found = source.match(rule.match);
    return found ? { type: `tex${index}`, raw: found[0], tex: found[1] ?? found[2] } : undefined;
  },
  renderer: (token) =>
    katex.renderToString(token.tex, { displayMode: rule.display, throwOnError: false, trust: false, maxExpand: 500 }),
}));

marked.use({
  gfm: true,
  breaks: true,
  extensions: texExtensions,
  renderer: {
    html: (token) => escapeHtml(token.text),
    image: (token) => escapeHtml(token.text || token.href),
    code: ({ text, lang }) => {
      const language = (lang || "").split(/\s/)[0];
      const known = hljs.getLanguage(language);
      const body = known ? hljs.highlight(text, { language }).value : escapeHtml(text);
      return `<pre><code>${body}</code></pre>`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
  }
});

function renderMarkup(text) {
  return DOMPurify.sanitize(marked.parse(text), {
    USE_PROFILES: { html: true, mathMl: true, svg: true },
    FORBID_TAGS: ["img", "style", "form", "input", "button", "textarea", "select", "audio", "video", "source", "image"],
    FORBID_ATTR: ["id", "name", "srcset", "src", "xlink:href"],
  });
}
