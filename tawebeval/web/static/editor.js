/** A field for a file that is written on the page: its name, its language, and an editor. */

import { element, setOptions } from "./dom.js";
import { say } from "./language.js";

const LANGUAGES = {
  py: "Python",
  cpp: "C++",
  c: "C",
  java: "Java",
  go: "Go",
  rs: "Rust",
  js: "JavaScript",
  sh: "Shell",
  awk: "AWK",
  txt: "Plain text",
};
const OTHER = ["", "Other"];

let loading = null;

/** Load the editor's library, which is large, when it is needed first. */
function loadLibrary() {
  loading ??= import("./vendor-editor.js");
  return loading;
}

/** Return the extension of a file name in small letters, without the dot. */
export function extensionOf(name) {
  return /\.([^.]*)$/.exec(name)?.[1].toLowerCase() ?? "";
}

/** Whether a file name is that of a program in a language of the editor. */
function isProgram(name) {
  const extension = extensionOf(name);
  return extension !== "txt" && Object.hasOwn(LANGUAGES, extension);
}

/**
 * Return elements for a text that is sent as the file `name`: `{ content, head, body }`. Languages
 * are those of the `extensions`, all if there are none. `content` is a textarea, which always has the text. The editor is before it where the name is that of a
 * program and the library can be loaded.
 */
export function sourceField({ label, name, text, extensions }) {
  const content = element("textarea", { rows: 4, value: text, required: true, spellcheck: false });
  content.classList.add("content");
  content.autocapitalize = "none";
  const nameInput = element("input", {
    className: "file-name",
    value: name,
    required: true,
    pattern: "[^\\/\\\\]+",
    title: say("a file name, without / and \\"),
    spellcheck: false,
    autocapitalize: "none",
  });
  const language = element("select", { className: "language" });
  const choices = extensions.map((extension) => [extension, LANGUAGES[extension] ?? `.${extension}`]);
  const offered = choices.length > 0 ? choices : [...Object.entries(LANGUAGES), OTHER];
  setOptions(language, offered.map(([extension, words]) => [extension, say(words)]));
  const place = element("div", { className: "code-editor", hidden: true });
  let editor = null;
  let marks = [];

  async function refresh() {
    const extension = extensionOf(nameInput.value);
    language.value = extension;
    if (language.value === "") language.value = OTHER[0]; // nothing, where the problem has no others
    if (!isProgram(nameInput.value)) return showPlain();
    const library = await loadLibrary().catch(() => null); // the textarea does, too
    if (library === null || extensionOf(nameInput.value) !== extension) return;
    if (editor === null) showEditor(library);
    else editor.setName(nameInput.value);
  }

  function showPlain() {
    editor?.destroy();
    editor = null;
    place.hidden = true;
    content.hidden = false;
  }

  function showEditor({ createEditor }) {
    const hadFocus = document.activeElement === content;
    editor = createEditor({
      parent: place,
      text: content.value,
      name: nameInput.value,
      label,
      describedBy: "editor-hint",
      changed: (next) => {
        content.value = next;
        content.dispatchEvent(new Event("input", { bubbles: true }));
      },
    });
    place.hidden = false;
    content.hidden = true;
    editor.setMarks(marks);
    if (hadFocus) editor.focus();
  }

  language.addEventListener("change", () => {
    const stem = nameInput.value.replace(/\.[^.]*$/, "");
    if (language.value !== "") nameInput.value = `${stem}.${language.value}`;
    nameInput.dispatchEvent(new Event("input", { bubbles: true }));
    if (language.value === "") nameInput.focus();
  });
  nameInput.addEventListener("input", refresh);
  content.addEventListener("replace", () => editor?.setText(content.value));
  content.addEventListener("edit", () => editor?.focus());
  content.addEventListener("mark", ({ detail }) => {
    marks = detail;
    editor?.setMarks(marks);
  });
  refresh();

  const head = element(
    "div",
    { className: "pair" },
    element("label", { className: "field" }, element("span", {}, say("Programming language")), language),
    element("label", { className: "field" }, element("span", {}, say("File name")), nameInput),
  );
  const body = element("label", { className: "field" }, element("span", {}, label), content);
  return { content, head, body: element("div", { className: "source" }, body, place) };
}

/**
 * Return the lines of a program, each a list of `[text, classes]`; null for other files, and where
 * the library cannot be loaded.
 */
export async function colourLines(name, text) {
  if (!isProgram(name)) return null;
  const library = await loadLibrary().catch(() => null);
  return library?.highlightLines(text, name) ?? null;
}

/** Put another text and file name into a field that `sourceField` has made; it can be undone. */
export function replaceSource(row, name, text) {
  const content = row.querySelector(".content");
  content.value = text;
  content.dispatchEvent(new Event("replace"));
  const nameInput = row.querySelector(".file-name");
  nameInput.value = name;
  nameInput.dispatchEvent(new Event("input", { bubbles: true }));
}

/**
 * Mark what a compiler has said of these very texts, `{ name, text, line, column, message,
 * severity }`; nothing in a field with another text.
 */
export function markSource(row, marks) {
  const content = row.querySelector(".content");
  const name = row.querySelector(".file-name").value;
  const isSame = (text) => text.replace(/\r\n?/g, "\n") === content.value; // as a textarea has it
  const detail = marks.filter((mark) => mark.name === name && isSame(mark.text));
  content.dispatchEvent(new CustomEvent("mark", { detail }));
}

/** Put the focus where a field is edited, which may be the editor before it. */
export function focusField(content) {
  content.focus();
  content.dispatchEvent(new Event("edit"));
}
