/**
 * Answers that had begun and were not finished, by their worker's failure or by our own end: their status is out, or they are a stream that
 * ended with an error. They are counted as what they are, and not as answered, nor as left by their client.
 */
import type { ServerResponse } from 'node:http';

/** No answer has this status otherwise: a worker that fails before its first byte is 503. */
const cutStatus = 502;
/** Of an answer whose client left. */
const leftStatus = 499;

const cut = new WeakSet<ServerResponse>();

/** Before its connection ends. */
export const markCut = (response: ServerResponse): void => void cut.add(response);

/** What is counted of an answer that is over. `isWhole`: its client has all of it. */
export const endedAs = (response: ServerResponse, isWhole = response.writableFinished): number => {
  if (cut.has(response)) return cutStatus;
  return isWhole ? response.statusCode : leftStatus;
};
