/**
 * What S3 servers (and whatever stands before them) say, before anybody believes it: each number of an answer is made here and nowhere
 * else, whole and in range, or is not there at all.
 */

/** A length or a number of bytes; undefined: it is none. */
export function countIn(text: string | undefined): number | undefined {
  if (text === undefined || !/^\d{1,16}$/.test(text)) return undefined;
  const count = Number(text);
  return Number.isSafeInteger(count) ? count : undefined;
}

/** Milliseconds of an HTTP date; undefined: it is none. */
export function dateIn(text: string | undefined): number | undefined {
  const ms = Date.parse(text ?? '');
  return isTime(ms) ? ms : undefined;
}

/** The head of an answer. */
export interface Head {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: ReadonlyMap<string, string>;
  /** Of the body that follows; undefined: it does not say. */
  readonly bodyBytes: number | undefined;
  /** The connection serves another exchange. */
  readonly keeps: boolean;
}

/** `text`: without the empty line behind it. A string: what is wrong with it. */
export function headIn(text: string): Head | string {
  const [statusLine = '', ...lines] = text.split('\r\n');
  const [, version, code] = /^HTTP\/1\.([01]) ([1-5]\d\d)(?: |$)/.exec(statusLine) ?? [];
  if (code === undefined) return 'the answer is not HTTP';
  const status = Number(code);
  const headers = new Map<string, string>();
  for (const line of lines) {
    const end = line.indexOf(':');
    const name = line.slice(0, Math.max(end, 0));
    if (name === '' || /\s/.test(name)) return 'the answer has a line that is no header';
    const [key, value] = [name.toLowerCase(), line.slice(end + 1).trim()];
    if (key === 'content-length' && headers.has(key) && headers.get(key) !== value) return 'the answer has two lengths';
    headers.set(key, value);
  }
  const length = headers.get('content-length');
  const bytes = countIn(length);
  if (length !== undefined && bytes === undefined) {
    return `the answer has a length of ${JSON.stringify(length.slice(0, 40))}`;
  }
  const isFramed = !headers.has('transfer-encoding'); // else its length says nothing
  return {
    ...{ status, headers },
    bodyBytes: status < 200 || status === 204 || status === 304 ? 0 : isFramed ? bytes : undefined,
    keeps: version === '1' && isFramed && headers.get('connection')?.toLowerCase() !== 'close',
  };
}

export interface ListedObject {
  readonly key: string;
  readonly etag: string;
  readonly bytes: number;
  readonly modifiedMs: number;
}

/** An object of a listing, as the SDK has it; undefined: something of it is missing or no such thing, and it is as if it was not named. */
export function listedIn(
  object: { Key?: unknown; ETag?: unknown; Size?: unknown; LastModified?: unknown },
  prefix: string,
): ListedObject | undefined {
  const { Key, ETag, Size, LastModified } = object;
  if (typeof Key !== 'string' || !Key.startsWith(prefix) || typeof ETag !== 'string') return undefined;
  const bytes = typeof Size === 'number' && Number.isSafeInteger(Size) && Size >= 0 ? Size : undefined;
  const modifiedMs = LastModified instanceof Date ? LastModified.getTime() : Number.NaN;
  if (bytes === undefined || !isTime(modifiedMs)) return undefined;
  return { key: Key.slice(prefix.length), etag: bareEtag(ETag), bytes, modifiedMs };
}

export const bareEtag = (etag: string): string => etag.replaceAll('"', '');

/** Of a server that can be anywhere in the centuries of its protocol. */
const isTime = (ms: number): boolean => ms > Date.UTC(1990, 0) && ms < Date.UTC(2200, 0);
