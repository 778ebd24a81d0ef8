// What the theme lacks for screen readers and keyboards; it adds buttons to code later.
function adapt() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const [index, bar] of document.querySelectorAll(".md-code__nav").entries()) {
    bar.setAttribute("aria-label", `Code ${index + 1}`);
  }
  for (const code of document.querySelectorAll("pre > code")) code.tabIndex = 0;
}
adapt();
new MutationObserver(adapt).observe(document.body, { childList: true, subtree: true });
