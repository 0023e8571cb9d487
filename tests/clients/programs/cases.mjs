// What the JavaScript programs share: the server's address, questions, and the loop over their cases.

import assert from "node:assert/strict";
import { z } from "zod";

export const URL = process.env.BOUGH_URL;
export const MODEL = "some-model";
export const ASK = "Write a function that adds two numbers.";
export const PICK = "Pick a fruit.";
export const WEATHER = "What is the weather in Paris?";
export const Fruit = z.object({ kind: z.enum(["apple", "pear"]), ripe: z.boolean() });
export const City = z.object({ city: z.enum(["Paris", "Rome"]) });
export const rain = ({ city }) => `Rain in ${city}`;

export async function all(stream) {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
}

/** Run the named cases, or all of them; print one JSON line for each. */
export async function run(cases) {
  const named = process.argv.slice(2);
  for (const name of named.length ? named : Object.keys(cases)) {
    const started = performance.now();
    let error = null;
    try {
      await cases[name]();
    } catch (thrown) {
      error = String(thrown?.stack ?? thrown);
      if (thrown?.responseBody) error += `\n${thrown.responseBody}`;
    }
    const seconds = Math.round(performance.now() - started) / 1000;
    console.log(JSON.stringify({ case: name, seconds, error }));
  }
}

export { assert };
