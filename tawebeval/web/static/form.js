/** The form: fields of the submission, the evaluator, and what is remembered of them. */

import { byId, element } from "./dom.js";

/** The form of the page; `changed` is called whenever a field has another value. */
export class SubmissionForm {
  constructor(changed) {
    this.form = byId("form");
    this.rows = byId("fields");
    this.changed = changed;
    this.form.addEventListener("input", () => this.#edited());
    byId("add-file").addEventListener("click", () => this.#add("file").focus());
    byId("add-text").addEventListener("click", () => this.#add("text").focus());
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
    return { values, fields };
  }

  /** Begin with values of an earlier visit, or with one field for a file. */
  restore({ values = {}, fields = [] } = {}) {
    for (const input of this.#inputs()) input.value = values[input.name] ?? "";
    byId("more").open = [...byId("more").querySelectorAll("input")].some((input) => input.value);
    this.rows.replaceChildren();
    for (const { name, kind, text } of fields) this.#add(kind, name, text);
    if (this.rows.childElementCount === 0) this.#add("file", "source");
    this.#edited();
  }

  /** Return the fields as they would be sent: `{ name, value }`, or `{ name, file }`. */
  get entries() {
    const submission = this.#fields().map(({ name, kind, content }) => {
      const field = `submission[${name.value || "source"}]`;
      if (kind === "text") return { name: field, value: content.value };
      return { name: field, file: content.files[0]?.name ?? "FILE" };
    });
    const others = [...this.#inputs()]
      .map((input) => ({ name: input.name, value: input.value.trim() }))
      .filter(({ value }) => value !== "");
    return [...submission, ...others];
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
    for (const input of this.#inputs()) {
      if (input.value.trim() !== "") data.append(input.name, input.value.trim());
    }
    return data;
  }

  /** Show what is wrong, beside the field that it is about where there is one. */
  showError(message, field) {
    byId("form-error").textContent = message;
    const input = field && this.#inputFor(field);
    if (!input) return;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", "form-error");
    if (byId("more").contains(input)) byId("more").open = true;
    input.focus();
  }

  /** Show that nothing is wrong. */
  clearError() {
    byId("form-error").textContent = "";
    for (const input of this.form.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  #inputs() {
    return this.form.querySelectorAll("input[name]");
  }

  #fields() {
    return [...this.rows.children].map((row) => ({
      row,
      kind: row.dataset.kind,
      name: row.querySelector(".name"),
      content: row.querySelector(".content"),
    }));
  }

  #inputFor(field) {
    const named = this.#fields().find(({ name }) => field === `submission[${name.value}]`);
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
    const content =
      kind === "text"
        ? element("textarea", { rows: 2, value: text, required: true, spellcheck: false })
        : element("input", { type: "file", required: true });
    content.classList.add("content");
    const remove = element("button", { type: "button", className: "small remove" }, "Remove");
    const labelled = (label, input) =>
      element("label", { className: "field" }, element("span", {}, label), input);
    const label = kind === "text" ? "Text" : "File";
    const row = element("li", {}, labelled("Field", nameInput), labelled(label, content), remove);
    row.dataset.kind = kind;
    remove.addEventListener("click", () => {
      row.remove();
      this.#edited();
      byId("add-file").focus();
    });
    this.rows.append(row);
    this.#edited();
    return nameInput;
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
    for (const { row, name } of fields) {
      const remove = row.querySelector(".remove");
      remove.hidden = fields.length === 1;
      remove.setAttribute("aria-label", `Remove the field ${name.value}`);
      const twice = fields.filter((other) => other.name.value === name.value).length > 1;
      name.setCustomValidity(twice ? "Each field needs a unique name." : "");
    }
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

  /** Put a file into the first field that has none, or into one more. */
  #put(file) {
    const isFree = ({ kind, content }) => kind === "file" && content.files.length === 0;
    if (!this.#fields().some(isFree)) this.#add("file");
    const carrier = new DataTransfer();
    carrier.items.add(file);
    this.#fields().find(isFree).content.files = carrier.files;
    this.#edited();
  }
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
