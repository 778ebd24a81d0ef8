/** The form: fields of the submission, the evaluator, and what is remembered of them. */

import { announce, byId, element, setOptions } from "./dom.js";
import { focusField, markSource, replaceSource, sourceField } from "./editor.js";
import { say } from "./language.js";
import { complaintOf } from "./validity.js";

/** The field of an input to run on, which the form of a problem may have besides. */
export const OWN_INPUT = "own_input";

const MOST_LABELS = 16; // of one evaluation, for the server
const MOST_EDITED = 256 * 1024; // bytes of a dropped file that is put into an editor

/** Fields of the form by short names, for links such as `#evaluate?repository=URL`. */
const SHORT_NAMES = {
  repository: "repository[url]",
  branch: "repository[branch]",
  depth: "repository[depth]",
  commit: "commit_oid",
  command: "evaluator_cmd",
};

/** The form of the page; `changed` is called whenever a field has another value. */
export class SubmissionForm {
  constructor(changed) {
    this.form = byId("form");
    this.form.noValidate = true; // `check` has better words than browsers
    this.rows = byId("fields");
    this.labels = byId("labels");
    this.changed = changed;
    this.problem = null; // the entry of the chosen problem; null for an own evaluator
    this.own = []; // rows for an own evaluator, while a problem is chosen
    this.environment = ""; // to be chosen when it is offered
    this.form.addEventListener("input", () => this.#edited());
    // Before the editor, which would begin a line.
    const isSending = ({ key, ctrlKey, metaKey }) => key === "Enter" && (ctrlKey || metaKey);
    this.form.addEventListener("keydown", (event) => {
      if (!isSending(event) || !event.target.matches("input, textarea, select, .cm-content")) return;
      event.preventDefault();
      event.stopPropagation();
      this.form.requestSubmit();
    }, { capture: true });
    byId("add-file").addEventListener("click", () => this.#add("file").focus());
    byId("add-text").addEventListener("click", () => this.#add("text").focus());
    byId("add-label").addEventListener("click", () => this.#addLabel().focus());
    this.#takeDrops();
  }

  /** Return what a later visit needs to begin with the same values; files cannot be kept. */
  get values() {
    const values = {};
    for (const input of this.#inputs()) values[input.name] = input.value;
    const labels = this.#labels().map(({ name, content }) => [name.value, content.value]);
    const rows = this.problem === null ? [...this.rows.children] : this.own;
    return { values, fields: rows.map(describeRow), labels };
  }

  /** Return the fields of the submission as `choose` takes them. */
  get draft() {
    return [...this.rows.children].map(describeRow);
  }

  /** Begin with values of an earlier visit, or with one field for a file. */
  restore({ values = {}, fields = [], labels = [] } = {}) {
    const kept = fields.length > 0 ? fields : [{ name: "source", kind: "file" }];
    this.rows.replaceChildren(...kept.map((field) => this.#makeRow(field)));
    this.labels.replaceChildren();
    for (const [name, value] of labels) this.#addLabel(name, value);
    this.#setInputs(values);
    this.#edited();
  }

  /**
   * Put submitted files into the fields, `[{ field, filename, text }]`. What was written before can
   * be undone where it is replaced in its field.
   */
  edit(files) {
    this.clearError();
    const rows = new Map(this.#fields().map(({ row, name }) => [name.value, row]));
    for (const { field, filename, text } of files) {
      if (field === OWN_INPUT && this.problem?.own_input) {
        byId("own-input-text").value = text;
        byId("own-input").open = true;
        continue;
      }
      const row = rows.get(field);
      if (row?.dataset.kind === "text") replaceSource(row, filename, text);
      else {
        const made = this.#makeRow({ name: field, kind: "text", text, file: filename });
        if (row !== undefined) row.replaceWith(made);
        else this.rows.append(made);
      }
      rows.delete(field);
    }
    if (!this.#isFixed) for (const row of rows.values()) row.remove();
    this.#edited();
    focusField(this.rows.querySelector(".content"));
  }

  /** Mark in the editors what a compiler has said of their texts, as `markSource` takes it. */
  mark(marks) {
    for (const { row, kind } of this.#fields()) if (kind === "text") markSource(row, marks);
  }

  /** Fill in the evaluator by the parameters of a link, which empties its other fields. */
  prefill(parameters) {
    const given = [...parameters].map(([name, value]) => [SHORT_NAMES[name] ?? name, value]);
    this.#setInputs(Object.fromEntries(given));
    this.#edited();
  }

  #setInputs(values) {
    for (const input of this.#inputs()) input.value = values[input.name] ?? "";
    this.environment = values.environment ?? "";
    this.#chooseEnvironment();
    for (const more of this.form.querySelectorAll("details")) {
      more.open = [...more.querySelectorAll("input")].some((input) => input.value);
    }
  }

  /** Offer environments; null where there are problems alone. */
  offer(environments) {
    const roots = (environments ?? []).map(({ name, description }, index) => [
      index === 0 ? "" : name, // nothing is sent for the default
      description ? `${name}: ${description}` : name,
    ]);
    setOptions(byId("environment"), roots, this.environment);
    byId("environment-field").hidden = roots.length < 2;
    this.#edited();
  }

  #chooseEnvironment() {
    byId("environment").value = this.environment;
    if (byId("environment").selectedIndex < 0) byId("environment").selectedIndex = 0;
  }

  /**
   * Show the fields of a problem, an entry of the server's list, as `draft` has them. A new one is
   * a text, whose file has the `usual` extension, unless the problem has others. Without a problem
   * show those of an own evaluator.
   */
  choose(problem, draft = [], usual = "py") {
    this.clearError(); // which may be in a row
    if (this.problem === null) this.own = [...this.rows.children];
    this.problem = problem;
    const extension = this.#extensions.includes(usual) ? usual : (this.#extensions[0] ?? usual);
    const names = this.#isFixed ? problem.fields : ["source"];
    const fresh = names.map((name) => ({ name, kind: "text", file: `${name}.${extension}` }));
    const fields = this.#isFixed
      ? fresh.map((field) => draft.find(({ name }) => name === field.name) ?? field)
      : draft.length > 0
        ? draft
        : fresh;
    const rows = problem === null ? this.own : fields.map((field) => this.#makeRow(field));
    this.rows.replaceChildren(...rows);
    byId("add-file").hidden = this.#isFixed;
    byId("add-text").hidden = this.#isFixed;
    byId("own-input").hidden = !problem?.own_input;
    byId("evaluator").hidden = problem !== null;
    byId("evaluator").disabled = problem !== null; // nothing in it is checked, then
    byId("form-title").textContent = say(problem === null ? "Evaluate a submission" : "Your solution");
    byId("form-title").ariaLevel = problem === null ? null : "2"; // the statement has the first
    this.#edited();
  }

  /** Whether the form has the fields of this problem already; null for an own evaluator. */
  isFor(problem) {
    const describe = ({ name, fields, extensions, own_input: ownInput } = {}) =>
      JSON.stringify([name, fields, extensions, ownInput]);
    return describe(problem ?? {}) === describe(this.problem ?? {});
  }

  /** Whether the problem says which fields it expects. */
  get #isFixed() {
    return this.problem !== null && this.problem.fields.length > 0;
  }

  /** The extensions of the files that the problem expects; none if it may have any. */
  get #extensions() {
    return this.problem?.extensions ?? [];
  }

  /** Return the fields as they would be sent: `{ name, value }`, or `{ name, file }`. */
  get entries() {
    const submission = this.#fields().map(({ row, name, kind, content }) => {
      const field = `submission[${name.value || "source"}]`;
      if (kind === "file") return { name: field, file: content.files[0]?.name ?? "FILE" };
      const file = fileName(row);
      // The name that the server gives to the text of a field without a file.
      const isPlain = file === `${name.value}.txt`;
      return isPlain ? { name: field, value: content.value } : { name: field, file };
    });
    return [...submission, ...this.#texts()];
  }

  /** Return the FormData. Throws an error with `field` for a file that cannot be read any more. */
  async data() {
    const data = new FormData();
    for (const { row, name, kind, content } of this.#fields()) {
      const field = `submission[${name.value}]`;
      // As a file, for in values that are none browsers end lines by "\r\n".
      if (kind === "text") data.append(field, new File([content.value], fileName(row)));
      else data.append(field, await readable(content.files[0], field));
    }
    for (const { name, value } of this.#texts()) data.append(name, value);
    return data;
  }

  /** Whether all fields can be sent; shows what is wrong with the first one that cannot. */
  check() {
    this.clearError();
    const inputs = [...this.form.querySelectorAll("input, select, textarea")];
    const wrong = inputs.find((input) => input.willValidate && !input.validity.valid);
    if (wrong !== undefined) this.#showErrorAt(wrong, complaintOf(wrong));
    return wrong === undefined;
  }

  /** Show what is wrong, below the field that it is about where there is one. */
  showError(message, field) {
    const input = field && this.#inputFor(field);
    if (input) this.#showErrorAt(input, message);
    else byId("form-error").textContent = message;
  }

  #showErrorAt(input, message) {
    const error = byId("form-error");
    input.closest(".pair, .source, .field").after(error);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", "form-error");
    const more = input.closest("details");
    if (more) more.open = true;
    focusField(input);
    error.textContent = message;
  }

  /** Show that nothing is wrong. */
  clearError() {
    byId("form-error").textContent = "";
    byId("send").before(byId("form-error"));
    for (const input of this.form.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  #inputs() {
    return this.form.querySelectorAll("input[name], select[name]");
  }

  #fields() {
    return [...this.rows.children].map((row) => ({
      row,
      kind: row.dataset.kind,
      name: row.querySelector(".name"),
      content: row.querySelector(".content"),
    }));
  }

  #labels() {
    return [...this.labels.children].map((row) => ({
      row,
      name: row.querySelector(".label-name"),
      content: row.querySelector(".label-value"),
    }));
  }

  /** Return the fields that are sent as text, except those of the submission. */
  #texts() {
    const labels = this.#labels().map(({ name, content }) => [
      `metadata[${name.value}]`,
      content.value,
    ]);
    const inputs = this.problem === null ? [...this.#inputs()] : [];
    const others = inputs.map(({ name, value }) => [name, value.trim()]);
    return [...others, ...labels]
      .filter(([, value]) => value !== "")
      .map(([name, value]) => ({ name, value }));
  }

  #inputFor(field) {
    const named =
      this.#fields().find(({ name }) => field === `submission[${name.value}]`) ??
      this.#labels().find(({ name }) => field === `metadata[${name.value}]`);
    return named?.content ?? this.form.querySelector(`[name="${CSS.escape(field)}"]`);
  }

  /** Add a field of the submission; return where its name is written. */
  #add(kind) {
    const row = this.#makeRow({ name: this.#freeName(), kind });
    this.rows.append(row);
    this.#edited();
    return row.querySelector(".name");
  }

  /** Return a row for a field: `text` and `file`, the name of its file, or `files` if chosen. */
  #makeRow({ name, kind, text = "", file = `${name}.txt`, files = null }) {
    const isFixed = this.#isFixed;
    const accept = this.#extensions.map((extension) => `.${extension}`).join();
    const words = say(kind === "text" ? "Choose a file" : "Enter text");
    const swap = element("button", { type: "button", className: "small swap" }, words);
    swap.setAttribute("aria-label", `${words}: ${name}`);
    const nameInput = element("input", {
      type: isFixed ? "hidden" : "text",
      className: "name",
      value: name,
      required: true,
      pattern: "[a-z][a-z0-9_]*",
      title: say("a to z, 0 to 9 and _, beginning with a letter"),
      spellcheck: false,
      autocapitalize: "none",
    });
    const label = isFixed ? name : say(kind === "text" ? "Text" : "File");
    const parts = isFixed ? [nameInput] : [labelled(say("Field"), nameInput)];
    if (kind === "text") {
      const { head, body } = sourceField({
        label,
        name: file,
        text,
        extensions: this.#extensions,
      });
      parts.push(head, body);
    } else {
      const content = element("input", { type: "file", required: true, className: "content", accept });
      if (files !== null) content.files = files;
      parts.push(labelled(label, content));
    }
    const row = element("li", {});
    const actions = element("div", { className: "actions" }, swap);
    if (!isFixed) actions.append(this.#removal(row, "add-file"));
    row.append(...parts, actions);
    row.dataset.kind = kind;
    let former = name;
    nameInput.addEventListener("input", () => {
      const file = row.querySelector(".file-name");
      // A file that is named after its field stays so.
      if (file?.value.startsWith(`${former}.`)) {
        file.value = nameInput.value + file.value.slice(former.length);
      }
      former = nameInput.value;
    });
    const replace = (other) => {
      this.clearError(); // which may be in this row
      const next = this.#makeRow({ name: nameInput.value, ...other });
      row.replaceWith(next);
      this.#edited();
      focusField(next.querySelector(".content"));
    };
    if (kind === "text") {
      const chooser = element("input", { type: "file", hidden: true, accept });
      actions.append(chooser);
      swap.addEventListener("click", () => chooser.click());
      chooser.addEventListener("change", () => {
        replace({ ...describeRow(row), kind: "file", files: chooser.files });
      });
    } else swap.addEventListener("click", () => replace({ kind: "text", text, file }));
    return row;
  }

  /** Add a label; return where its name is written. */
  #addLabel(name = "", value = "") {
    const nameInput = element("input", {
      className: "label-name",
      value: name,
      required: true,
      pattern: "[a-z0-9_.\\-]{1,64}",
      title: say("a to z, 0 to 9 and _ . -"),
      spellcheck: false,
      autocapitalize: "none",
    });
    const content = element("input", { className: "label-value", value, required: true });
    content.spellcheck = false;
    const row = element("li", {}, labelled(say("Label"), nameInput), labelled(say("Value"), content));
    row.append(this.#removal(row, "add-label"));
    this.labels.append(row);
    this.#edited();
    return nameInput;
  }

  /** Return a button that removes a row, and then puts the focus on the button `next`. */
  #removal(row, next) {
    const remove = element("button", { type: "button", className: "small remove" }, say("Remove"));
    remove.addEventListener("click", () => {
      this.clearError(); // which may be in this row
      row.remove();
      this.#edited();
      byId(next).focus();
    });
    return remove;
  }

  #freeName() {
    const taken = new Set(this.#fields().map(({ name }) => name.value));
    if (!taken.has("source")) return "source";
    let number = 2;
    while (taken.has(`source_${number}`)) number += 1;
    return `source_${number}`;
  }

  #edited() {
    const fields = this.#fields();
    for (const { row, name } of this.#isFixed ? [] : fields) {
      const remove = row.querySelector(".remove");
      remove.hidden = fields.length === 1;
      remove.setAttribute("aria-label", say("Remove the field {name}", { name: name.value }));
      refuseTwice(fields, name, say("Each field needs a unique name."));
    }
    const labels = this.#labels();
    for (const { row, name } of labels) {
      const words = say("Remove the label {name}", { name: name.value });
      row.querySelector(".remove").setAttribute("aria-label", words);
      refuseTwice(labels, name, say("Each label needs a unique name."));
    }
    byId("add-label").hidden = labels.length >= MOST_LABELS;
    this.changed();
  }

  #takeDrops() {
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    let within = 0; // elements that the pointer has entered and not left
    const show = () => document.body.classList.toggle("dropping", within > 0);
    addEventListener("dragenter", (event) => {
      if (!carriesFiles(event)) return;
      within += 1;
      show();
    });
    addEventListener("dragleave", (event) => {
      if (!carriesFiles(event)) return;
      within -= 1;
      show();
    });
    // Otherwise the browser would leave the page and show the file.
    addEventListener("dragover", (event) => carriesFiles(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      within = 0;
      show();
      if (byId("form").checkVisibility()) this.#putAll([...event.dataTransfer.files]);
    });
  }

  async #putAll(files) {
    for (const file of files) await this.#put(file);
  }

  /** Put a file into the first empty field, or into one more; else into the last one. */
  async #put(file) {
    const isEmpty = ({ kind, content }) =>
      kind === "file" ? content.files.length === 0 : content.value === "";
    if (!this.#isFixed && !this.#fields().some(isEmpty)) this.#add("file");
    const fields = this.#fields();
    const { row, name, kind } = fields.find(isEmpty) ?? fields.at(-1);
    const text = kind === "text" ? await textOf(file) : null;
    if (text !== null) {
      replaceSource(row, file.name, text);
      const values = { file: file.name, field: name.value };
      announce(say("The text of {file} is in the field {field}.", values));
      return;
    }
    const carrier = new DataTransfer();
    carrier.items.add(file);
    if (kind === "text") {
      row.replaceWith(this.#makeRow({ name: name.value, kind: "file", files: carrier.files }));
    } else row.querySelector(".content").files = carrier.files;
    this.#edited();
  }
}

/** Return a row of the submission as `SubmissionForm.choose` takes it. */
function describeRow(row) {
  const { kind } = row.dataset;
  const name = row.querySelector(".name").value;
  if (kind === "file") return { name, kind };
  return { name, kind, text: row.querySelector(".content").value, file: fileName(row) };
}

/** Return the file name of a text. */
function fileName(row) {
  return row.querySelector(".file-name").value;
}

/** Return what a file has for an editor; null if it is large or not text. */
async function textOf(file) {
  if (file.size > MOST_EDITED) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null; // read again when it is sent, which says what is wrong
  }
}

function labelled(label, input) {
  return element("label", { className: "field" }, element("span", {}, label), input);
}

function refuseTwice(rows, name, message) {
  const twice = rows.filter((other) => other.name.value === name.value).length > 1;
  name.setCustomValidity(twice ? message : "");
}

/** Return a file. Throws where it has changed since it was chosen: browsers do not read it then. */
async function readable(file, field) {
  try {
    await file.slice(0, 1).arrayBuffer();
  } catch {
    const words = "{file} has changed or was removed since you chose it; choose it again.";
    const message = say(words, { file: file.name });
    throw Object.assign(new Error(message), { field });
  }
  return file;
}
