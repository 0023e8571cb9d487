// Simple syntax highlighting with patterns that most languages share.

const WORDS = new Set(
  ("abstract and as assert async await break case catch class const continue def default defer del do elif else enum except export extends " +
    "extern final finally fn for from func function global go if impl implements import in interface is lambda let loop match mod mut " +
    "namespace new nonlocal not of or override package pass private protected pub public raise return select self static struct super " +
    "switch template this throw throws trait try type typedef typeof union unsafe use using var virtual void where while with yield " +
    "True False None true false null nil undefined int float double bool char string str SELECT FROM WHERE INSERT UPDATE DELETE JOIN " +
    "ON GROUP BY ORDER LIMIT INTO VALUES CREATE TABLE AND OR NOT AS then fi done echo").split(" "),
);
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md", "output", "console", "diff"]);
const HASH_COMMENTS = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "makefile", "dockerfile"]);

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|` + "`(?:\\\\.|[^`\\\\])*`?";
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

function commentPattern(language) {
  if (HASH_COMMENTS.has(language)) return String.raw`#[^\n]*`;
  if (["sql", "lua", "haskell", "hs"].includes(language)) return String.raw`--[^\n]*`;
  if (["html", "xml", "svg"].includes(language)) return String.raw`<!--[\s\S]*?(?:-->|$)`;
  if (language === "css") return String.raw`/\*[\s\S]*?(?:\*/|$)`;
  return String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`;
}

/** Returns spans and strings whose text together is exactly `source`. */
export function highlight(source, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name)) return [source];
  const pattern = new RegExp(`(?<comment>${commentPattern(name)})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>${WORD})`, "g");
  const parts = [];
  let plain = 0;
  for (const match of source.matchAll(pattern)) {
    const { comment, string, number, word } = match.groups;
    const called = word && source[match.index + word.length] === "(";
    const kind = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word) ? "keyword" : called ? "call" : "";
    if (!kind) continue;
    if (match.index > plain) parts.push(source.slice(plain, match.index));
    const span = document.createElement("span");
    span.className = `hl-${kind}`;
    span.textContent = match[0];
    parts.push(span);
    plain = match.index + match[0].length;
  }
  if (plain < source.length) parts.push(source.slice(plain));
  return parts;
}
