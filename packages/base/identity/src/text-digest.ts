/**
 * Which tokenizer and chat template a model folder has. An engine worker says it of the files that lay there while it loaded its weights; an API
 * server, which reads them by itself and perhaps later, compares: ids of another tokenizer are other words to that engine.
 */
import { createHash } from 'node:crypto';

/** All that makes text of tokens, and tokens of text. */
export const textFiles = [
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
] as const;

export type TextFile = (typeof textFiles)[number];

/** The one that says what each id means; the others make prompts of texts. */
export const tokenFiles: readonly TextFile[] = ['tokenizer.json'];

/** Hex, over each file's content or that there is none. */
export function textDigestOf(
  contentOf: (name: TextFile) => Uint8Array | undefined,
  files: readonly TextFile[] = textFiles,
): string {
  const digest = createHash('sha256');
  for (const name of files) {
    const content = contentOf(name);
    digest.update(`${name}:${content?.length ?? 'none'};`);
    if (content) digest.update(content);
  }
  return digest.digest('hex');
}
