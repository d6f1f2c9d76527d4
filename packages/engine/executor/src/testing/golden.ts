/** The golden models: tiny ones of every family, with the logits that Hugging Face transformers gives for them in fp32. Test code only. */
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const folder = fileURLToPath(new URL('../../../../../test/numerics/golden/', import.meta.url));

export const goldenFamilies = [
  'llama',
  'llama-bias-linear',
  'llama3-rope',
  'mistral-window',
  'qwen2',
  'qwen3-yarn',
  'gemma3',
  'ministral-mixed',
  'gemma3-vision',
];

/** `logits[i]`: of the token after `tokens[positions[i]]`. */
export interface Golden {
  readonly tokens: number[];
  readonly positions: number[];
  readonly logits: number[][];
}

export const goldenDir = (family: string): string => `${folder}${family}`;

export const readGolden = (family: string): Golden =>
  JSON.parse(readFileSync(`${goldenDir(family)}/golden.json`, 'utf8')) as Golden;
