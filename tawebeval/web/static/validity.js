/** What is wrong with an input, in words of this page. */

/**
 * Return a sentence about the first constraint that an input does not meet. The title of an input
 * says what its pattern allows.
 */
export function complaintOf(input) {
  const { validity, title, min, max, type, name } = input;
  const label = labelOf(input);
  if (validity.customError) return input.validationMessage;
  if (validity.valueMissing) {
    if (type === "file") return "Choose a file.";
    if (input.matches("textarea")) return "Write your solution, or drop a file here.";
    return `${label} is missing.`;
  }
  if (validity.patternMismatch) return `${label}: ${title}.`;
  const range = max ? `from ${min} to ${max}` : `of at least ${min}`;
  return `${label}: a whole number ${range}.`;
}

/** Return the words of an input's label, without what is only a hint. */
function labelOf(input) {
  return input.labels[0]?.firstElementChild?.firstChild?.textContent.trim() ?? "This";
}
