/** JSON that somebody has written, who is told where it is wrong, and nothing of what it says. */
import { KvError } from '@kvtier/errors';

/** The parser's own words quote the text, which may hold a password: of them only the place is told. @throws KvError CONFIG */
export function parseJson(text: string, source: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    const place = placeIn(text, (error as Error).message);
    throw new KvError('CONFIG', `${source}: not valid JSON${place}; correct it`, { isFinal: true });
  }
}

function placeIn(text: string, message: string): string {
  if (message.startsWith('Unexpected end')) return ' (it ends too early)';
  const position = /at position (\d+)/.exec(message)?.[1];
  if (position === undefined) return '';
  const before = text.slice(0, Number(position)).split('\n');
  return ` (line ${before.length}, column ${before.at(-1)!.length + 1})`;
}
