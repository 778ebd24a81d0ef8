/**
 * The API reference: Swagger UI over openapi.json, in the colours that the browser prefers.
 *
 * `make docs` marks the page of the site by `data-static`: there is no daemon to send requests to.
 */

const dark = matchMedia("(prefers-color-scheme: dark)");
const adapt = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
adapt();
dark.addEventListener("change", adapt);

/** What screen readers miss: a landmark, and a heading above the tags. One server is no choice. */
const adaptComponents = ({ React: { createElement, Fragment } }) => ({
  wrapComponents: {
    ServersContainer: () => () => null,
    InfoContainer: (Info) => (properties) =>
      createElement("section", { "aria-label": "About" }, createElement(Info, properties)),
    operations: (Operations) => (properties) =>
      createElement(
        Fragment,
        null,
        createElement("h2", null, "Operations"),
        createElement(Operations, properties),
      ),
  },
});

const isStatic = "static" in document.querySelector("#reference").dataset;
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  plugins: [adaptComponents],
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  // Its colours have too little contrast.
  syntaxHighlight: { activated: false },
  // The description is not sent to the validator of another host.
  validatorUrl: null,
  supportedSubmitMethods: isStatic ? [] : ["get", "post", "delete"],
});
