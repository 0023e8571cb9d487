// Continue's command line with a configuration of its own, as docs/server.md gives it, by either protocol.

import { execFile } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { ASK, assert, run, URL as SERVER } from "./cases.mjs";

const program = fileURLToPath(new URL("../node_modules/.bin/cn", import.meta.url));

/** Return what it prints for one prompt, with a model that has these fields. */
async function answer(fields) {
  const home = mkdtempSync(join(tmpdir(), "continue-"));
  const config = join(home, "config.yaml");
  const model = { name: "bough", model: "some-model", ...fields, defaultCompletionOptions: { maxTokens: 64 } };
  // JSON is YAML.
  writeFileSync(config, JSON.stringify({ name: "local", version: "0.0.1", schema: "v1", models: [model] }));
  const env = { ...process.env, HOME: home, CONTINUE_GLOBAL_DIR: home, CONTINUE_TELEMETRY_ENABLED: "0" };
  const running = promisify(execFile)(program, ["-p", "--config", config, ASK], { cwd: home, env, timeout: 120000 });
  running.child.stdin.end();
  return (await running).stdout;
}

await run({
  case_openai: async () => {
    assert.ok((await answer({ provider: "openai", apiBase: `${SERVER}/v1`, apiKey: "none" })).trim());
  },

  case_ollama: async () => {
    assert.ok((await answer({ provider: "ollama", apiBase: SERVER })).trim());
  },
});
