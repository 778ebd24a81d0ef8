/** The form: fields of the submission, the evaluator, and what is remembered of them. */

import { byId, element, setOptions } from "./dom.js";

const MOST_LABELS = 16; // of one evaluation, for the server

/** The form of the page; `changed` is called whenever a field has another value. */
export class SubmissionForm {
  constructor(changed) {
    this.form = byId("form");
    this.rows = byId("fields");
    this.labels = byId("labels");
    this.changed = changed;
    this.problems = new Map(); // by name
    this.fixed = []; // names of the fields that the chosen problem expects; empty: any
    this.free = []; // rows of other fields, while they are not shown
    byId("problem").addEventListener("change", () => this.#choose());
    this.form.addEventListener("input", () => this.#edited());
    byId("add-file").addEventListener("click", () => this.#add("file").focus());
    byId("add-text").addEventListener("click", () => this.#add("text").focus());
    byId("add-label").addEventListener("click", () => this.#addLabel().focus());
    // A browser says nothing about an input that it cannot show.
    this.form.addEventListener("invalid", ({ target }) => reveal(target), true);
    this.#takeDrops();
  }

  /** Return what a later visit needs to begin with the same values; files cannot be kept. */
  get values() {
    const values = {};
    for (const input of this.#inputs()) values[input.name] = input.value;
    const fields = this.#fields().map(({ name, kind, content }) => {
      const field = { name: name.value, kind };
      return kind === "text" ? { ...field, text: content.value } : field;
    });
    const labels = this.#labels().map(({ name, content }) => [name.value, content.value]);
    return { problem: this.problem, values, fields, labels };
  }

  /** Begin with values of an earlier visit, or with one field for a file. */
  restore({ problem = "", values = {}, fields = [], labels = [] } = {}) {
    this.remembered = { problem, environment: values.environment };
    for (const input of this.#inputs()) input.value = values[input.name] ?? "";
    this.rows.replaceChildren();
    this.labels.replaceChildren();
    for (const { name, kind, text } of fields) this.#add(kind, name, text);
    if (this.rows.childElementCount === 0) this.#add("file", "source");
    for (const [name, value] of labels) this.#addLabel(name, value);
    for (const more of this.form.querySelectorAll("details")) {
      more.open = [...more.querySelectorAll("input")].some((input) => input.value);
    }
    this.#edited();
  }

  /** The name of the chosen problem; empty for another evaluator. */
  get problem() {
    return byId("problem").value;
  }

  /** Offer problems and environments; where these are null, the problems alone. */
  offer({ problems, environments }) {
    this.problems = new Map(problems.map((problem) => [problem.name, problem]));
    const own = environments === null ? [] : [["", "Own evaluator"]];
    const titles = problems.map(({ name, title }) => [name, title || name]);
    setOptions(byId("problem"), [...own, ...titles], this.remembered.problem);
    byId("problem-field").hidden = problems.length === 0;
    const roots = (environments ?? []).map(({ name, description }, index) => [
      index === 0 ? "" : name, // nothing is sent for the default
      description ? `${name}: ${description}` : name,
    ]);
    setOptions(byId("environment"), roots, this.remembered.environment);
    byId("environment-field").hidden = roots.length < 2;
    this.#choose();
  }

  /** Show the fields of the chosen problem, or all; those of the same name keep what they have. */
  #choose() {
    this.clearError(); // which may be in a row
    const before = this.#fields();
    if (this.fixed.length === 0) this.free = [...this.rows.children];
    this.fixed = this.problems.get(this.problem)?.fields ?? [];
    const isFixed = this.fixed.length > 0;
    const rows = this.fixed.map((name) => {
      const same = before.find((field) => field.name.value === name);
      if (same?.kind === "text") return this.#fixedRow("text", name, same.content.value);
      return this.#fixedRow("file", name, "", same?.content.files);
    });
    this.rows.replaceChildren(...(isFixed ? rows : this.free));
    byId("add-file").hidden = isFixed;
    byId("add-text").hidden = isFixed;
    byId("evaluator").hidden = this.problem !== "";
    byId("evaluator").disabled = this.problem !== ""; // nothing in it is checked, then
    this.#edited();
  }

  /** Return the fields as they would be sent: `{ name, value }`, or `{ name, file }`. */
  get entries() {
    const submission = this.#fields().map(({ name, kind, content }) => {
      const field = `submission[${name.value || "source"}]`;
      if (kind === "text") return { name: field, value: content.value };
      return { name: field, file: content.files[0]?.name ?? "FILE" };
    });
    return [...submission, ...this.#texts()];
  }

  /** Return the FormData. Throws an error with `field` for a file that cannot be read any more. */
  async data() {
    const data = new FormData();
    for (const { name, kind, content } of this.#fields()) {
      const field = `submission[${name.value}]`;
      // As a file, for in values that are none browsers end lines by "\r\n".
      if (kind === "text") data.append(field, new File([content.value], `${name.value}.txt`));
      else data.append(field, await readable(content.files[0], field));
    }
    for (const { name, value } of this.#texts()) data.append(name, value);
    return data;
  }

  /** Show what is wrong, below the field that it is about where there is one. */
  showError(message, field) {
    const error = byId("form-error");
    const input = field && this.#inputFor(field);
    if (input) {
      input.closest(".pair, .field").after(error);
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-describedby", "form-error");
      reveal(input);
      input.focus();
    }
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
    const inputs = this.problem ? [] : [...this.#inputs()];
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
  #add(kind, name = this.#freeName(), text = "") {
    const nameInput = element("input", {
      className: "name",
      value: name,
      required: true,
      pattern: "[a-z][a-z0-9_]*",
      title: "a to z, 0 to 9 and _, beginning with a letter",
      spellcheck: false,
      autocapitalize: "none",
    });
    const label = labelled(kind === "text" ? "Text" : "File", contentInput(kind, text));
    const row = this.#row([labelled("Field", nameInput), label], "add-file");
    row.dataset.kind = kind;
    this.rows.append(row);
    this.#edited();
    return nameInput;
  }

  /** Return a row for a field that the problem expects, with a button for the other kind. */
  #fixedRow(kind, name, text = "", files = null) {
    const content = contentInput(kind, text);
    if (files !== null) content.files = files;
    const words = kind === "text" ? "Choose a file" : "Enter text";
    const swap = element("button", { type: "button", className: "small swap" }, words);
    swap.setAttribute("aria-label", `${words}: ${name}`);
    const fixed = element("input", { type: "hidden", className: "name", value: name });
    const row = element("li", {}, fixed, labelled(name, content), swap);
    row.dataset.kind = kind;
    swap.addEventListener("click", () => {
      this.clearError(); // which may be in this row
      const other = this.#fixedRow(kind === "text" ? "file" : "text", name);
      row.replaceWith(other);
      other.querySelector(".content").focus();
      this.#edited();
    });
    return row;
  }

  /** Add a label; return where its name is written. */
  #addLabel(name = "", value = "") {
    const nameInput = element("input", {
      className: "label-name",
      value: name,
      required: true,
      pattern: "[a-z0-9_.\\-]{1,64}",
      title: "a to z, 0 to 9 and _ . -",
      spellcheck: false,
      autocapitalize: "none",
    });
    const content = element("input", { className: "label-value", value, required: true });
    content.spellcheck = false;
    this.labels.append(
      this.#row([labelled("Label", nameInput), labelled("Value", content)], "add-label"),
    );
    this.#edited();
    return nameInput;
  }

  /** Return a row with a button that removes it, and then puts the focus on another button. */
  #row(children, next) {
    const remove = element("button", { type: "button", className: "small remove" }, "Remove");
    const row = element("li", {}, ...children, remove);
    remove.addEventListener("click", () => {
      this.clearError(); // which may be in this row
      row.remove();
      this.#edited();
      byId(next).focus();
    });
    return row;
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
    for (const { row, name } of this.fixed.length > 0 ? [] : fields) {
      const remove = row.querySelector(".remove");
      remove.hidden = fields.length === 1;
      remove.setAttribute("aria-label", `Remove the field ${name.value}`);
      refuseTwice(fields, name, "Each field needs a unique name.");
    }
    const labels = this.#labels();
    for (const { row, name } of labels) {
      row.querySelector(".remove").setAttribute("aria-label", `Remove the label ${name.value}`);
      refuseTwice(labels, name, "Each label needs a unique name.");
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
      for (const file of event.dataTransfer.files) this.#put(file);
    });
  }

  /** Put a file into the first field that has none, or into one more; else into the last one. */
  #put(file) {
    const isFree = ({ kind, content }) => kind === "file" && content.files.length === 0;
    if (this.fixed.length === 0 && !this.#fields().some(isFree)) this.#add("file");
    const fields = this.#fields();
    const place = fields.find(isFree) ?? fields.findLast(({ kind }) => kind === "file");
    if (place === undefined) return;
    const carrier = new DataTransfer();
    carrier.items.add(file);
    place.content.files = carrier.files;
    this.#edited();
  }
}

/** Return where a file is chosen, or a text is written. */
function contentInput(kind, text) {
  const content =
    kind === "text"
      ? element("textarea", { rows: 2, value: text, required: true, spellcheck: false })
      : element("input", { type: "file", required: true });
  content.classList.add("content");
  return content;
}

function labelled(label, input) {
  return element("label", { className: "field" }, element("span", {}, label), input);
}

/** Open what an input is hidden in. */
function reveal(input) {
  const more = input.closest("details");
  if (more) more.open = true;
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
    const message = `${file.name} has changed or was removed since you chose it; choose it again.`;
    throw Object.assign(new Error(message), { field });
  }
  return file;
}
