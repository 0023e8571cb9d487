// Renders /openapi.json as a list of routes, with text nodes only.

function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

function typeOf(schema, schemas) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => typeOf(each, schemas)).filter((each) => each !== "null").join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items, schemas) || "anything"}`;
  return schema.type ?? "anything";
}

function fields(schema, schemas) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, each]) =>
    element("tr", {},
      element("td", {}, element("code", { textContent: name })),
      element("td", { textContent: typeOf(each, schemas) + (required.has(name) ? ", required" : "") }),
      element("td", { textContent: each.description ?? "" })));
  return element("table", {}, element("tbody", {}, ...rows));
}

function route(path, method, described, schemas) {
  const name = element("span", { className: "method", textContent: method.toUpperCase() });
  const parts = [element("summary", {}, name, element("code", { textContent: path }))];
  if (described.description) parts.push(element("p", { textContent: described.description }));
  const body = described.requestBody?.content?.["application/json"]?.schema;
  if (body?.$ref) parts.push(fields(schemas[body.$ref.split("/").pop()], schemas));
  return element("details", {}, ...parts);
}

async function main() {
  const host = document.getElementById("routes");
  const response = await fetch("openapi.json");
  if (!response.ok) {
    host.textContent = `openapi.json: ${response.status}`;
    return;
  }
  const api = await response.json();
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      const group = (described.tags ?? ["Other"]).join(", ");
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(route(path, method, described, api.components.schemas));
    }
  }
  host.replaceChildren(...[...groups].flatMap(([group, routes]) => [element("h2", { textContent: group }), ...routes]));
}

main();
