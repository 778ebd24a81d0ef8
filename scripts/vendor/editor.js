/** An editor of CodeMirror with the languages of classes; editor.js loads it. */

import { closeBrackets, closeBracketsKeymap } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { cpp } from "@codemirror/lang-cpp";
import { go } from "@codemirror/lang-go";
import { java } from "@codemirror/lang-java";
import { javascript } from "@codemirror/lang-javascript";
import { python } from "@codemirror/lang-python";
import { rust } from "@codemirror/lang-rust";
import {
  bracketMatching,
  indentOnInput,
  indentUnit,
  syntaxHighlighting,
} from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { Compartment, EditorState } from "@codemirror/state";
import {
  EditorView,
  drawSelection,
  highlightActiveLine,
  keymap,
  lineNumbers,
} from "@codemirror/view";
import { classHighlighter, highlightCode } from "@lezer/highlight";

const c = cpp();
const LANGUAGES = {
  py: python(),
  c,
  h: c,
  cc: c,
  cpp: c,
  cxx: c,
  hpp: c,
  java: java(),
  go: go(),
  rs: rust(),
  js: javascript(),
  mjs: javascript(),
  ts: javascript({ typescript: true }),
};

/** Return the language support for the extension of a file name, nothing for others. */
function languageOf(name) {
  return LANGUAGES[name.split(".").at(-1).toLowerCase()] ?? [];
}

/**
 * Make an editor in `parent`. `name` is the file's name, `label` and `describedBy` are for screen
 * readers, `changed` is called with the text after each change.
 */
export function createEditor({ parent, text, name, label, describedBy, changed }) {
  const language = new Compartment();
  const view = new EditorView({
    parent,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(),
        history(),
        drawSelection(),
        indentOnInput(),
        indentUnit.of("    "),
        bracketMatching(),
        closeBrackets(),
        highlightActiveLine(),
        lintGutter(),
        syntaxHighlighting(classHighlighter),
        // After Escape, Tab moves the focus, as everywhere else on a page.
        keymap.of([...closeBracketsKeymap, ...defaultKeymap, ...historyKeymap, ...lintKeymap, indentWithTab]),
        language.of(languageOf(name)),
        EditorView.contentAttributes.of({ "aria-label": label, "aria-describedby": describedBy }),
        EditorView.updateListener.of((update) => {
          if (update.docChanged) changed(update.state.doc.toString());
        }),
      ],
    }),
  });
  return {
    focus: () => view.focus(),
    setText: (next) =>
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: next } }),
    setName: (next) => view.dispatch({ effects: language.reconfigure(languageOf(next)) }),
    setMarks: (marks) => {
      const { doc } = view.state;
      const diagnostics = marks
        .filter(({ line }) => line >= 1 && line <= doc.lines)
        .map(({ line, column, message, severity }) => {
          const { from, to } = doc.line(line);
          const start = Math.min(to, from + Math.max(0, (column ?? 1) - 1));
          return { from: start, to, message, severity };
        });
      view.dispatch(setDiagnostics(view.state, diagnostics));
    },
    destroy: () => view.destroy(),
  };
}

/** Return the lines of a file, each a list of `[text, classes]`, "" for text without a colour. */
export function highlightLines(text, name) {
  const support = languageOf(name);
  if (Array.isArray(support)) return text.split("\n").map((line) => [[line, ""]]);
  const lines = [[]];
  highlightCode(
    text,
    support.language.parser.parse(text),
    classHighlighter,
    (piece, classes) => lines.at(-1).push([piece, classes]),
    () => lines.push([]),
  );
  return lines;
}
