/**
 * Images, sound and videos in the messages of a chat, as they count where nobody here makes tokens of them: each is a stand-in of one
 * length, whatever its bytes are, which differs where they do.
 *
 *   {"type":"image_url","image_url":{"url":"data:image/png;base64,iVBOR…"}}  ─►  {"type":"image_url","image_url":"4fe0…4fe0…4fe0…"}
 *
 * What stands before it stays as it was, so that prompts which begin alike still do.
 */
import { createHash } from 'node:crypto';

/**
 * Tokens that one counts as. Engines make as many of it as its pixels need, which are not read here: LLaVA-1.5 makes 576 tokens of a
 * picture, Qwen2-VL one of 28 × 28 pixels, which is 1,036 of 1,024 × 768.
 */
export const attachmentTokens = 1_024;
/** Of text that counts as a token. */
export const bytesPerToken = 4;

const digestChars = 32;
/** Parts of a message that are no text, by OpenAI's `type` and those that vLLM and SGLang add; what they hold has the same name. */
const kinds: ReadonlySet<unknown> = new Set([
  ...['image_url', 'input_audio', 'file', 'video_url', 'audio_url'],
  ...['image', 'image_pil', 'image_embeds', 'audio_embeds', 'video'],
]);
/** What under these names looks like data is text to the engine, too. */
const texts: ReadonlySet<string> = new Set(['text', 'content', 'arguments']);
/** Names and ids are shorter than data that is worth looking at. */
const leastDataChars = 1_024;
const base64 = /^[A-Za-z0-9+/_-]+={0,2}$/;
/** What comes before the data of a data URL (RFC 2397); its head is short. */
const dataUrl = /^data:[\w.+-]*\/?[\w.+-]*(;[\w.=+-]+)*,/;
const mostHeadChars = 256;

/** JSON of messages, with a stand-in for each attachment. */
export const jsonOfMessages = (messages: unknown): string => JSON.stringify(messages, standIn) ?? '';

/** As `JSON.stringify` calls it. */
function standIn(this: unknown, name: string, value: unknown): unknown {
  if (kinds.has(name) && (this as { type?: unknown }).type === name && value !== null && value !== undefined)
    return digestOf(typeof value === 'string' ? value : JSON.stringify(value));
  return typeof value === 'string' && !texts.has(name) && isData(value) ? digestOf(value) : value;
}

const isData = (value: string): boolean =>
  value.length >= leastDataChars && (dataUrl.test(value.slice(0, mostHeadChars)) || base64.test(value));

const digestOf = (data: string): string =>
  createHash('sha256')
    .update(data)
    .digest('hex')
    .slice(0, digestChars)
    .repeat((attachmentTokens * bytesPerToken) / digestChars);
