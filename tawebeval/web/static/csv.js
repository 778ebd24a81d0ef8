/** CSV for spreadsheets (RFC 4180), in which no text can become a formula. */

// What a spreadsheet may take for the beginning of a cell: it may split at other characters than
// a comma, and drops what stands here between.
// The lookbehind comes last: first, it would take quadratic time in long runs of spaces.
const FORMULA =
  /[=+\-@\uff1d\uff0b\uff0d\uff20](?<=(?:^|[;,|\t\v\f\r\n\u0085\u2028\u2029])[\s"'\u200b\ufeff]*.)/g;
const CONTROL = /[\0-\x08\x0e-\x1f\x7f]/g;

/** Return rows, arrays of texts, numbers and null, as a text of CSV. */
export function makeCsv(rows) {
  return rows.map((row) => `${row.map(makeCell).join(",")}\r\n`).join("");
}

/** Let the browser save rows as the file `name`. */
export function saveCsv(name, rows) {
  const blob = new Blob(["\ufeff", makeCsv(rows)], { type: "text/csv" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Return a cell. A number stays one; a text with what could be a formula gets apostrophes. */
function makeCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = value.replace(CONTROL, "").replace(FORMULA, "'$&");
  return `"${text.replaceAll('"', '""')}"`;
}
