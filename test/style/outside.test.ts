/**
 * No wait for a server without a limit (law 2): clients that wait by themselves are made inside an `Outside`, whose only way to a
 * promise takes a limit; and what is a wait by its name stands inside `within`, `ask` or a signal.
 */
import { expect, it } from 'vitest';
import { filesBelow, isTest, read } from './tree.ts';

const sources = ['packages', 'services']
  .flatMap((folder) => filesBelow(folder, ['.ts']))
  .filter((path) => !isTest(path) && !path.includes('/testing/') && !path.includes('/generated/'));

/** Clients with a connection of their own: `new Client(...)` belongs into `new Outside(what, new Client(...))`. */
const clients = /new (?:\w+\.)?(?:Redis|Cluster|S3Client|STSClient)\(/g;
/** Calls that wait for somebody else; what bounds them must begin within the lines before, or follow at once. */
const waits = /\b(?:await|return|void) (?:fetch|dns\.\w+)\(/g;
const linesBefore = 3;

const before = (text: string, at: number): string => text.slice(0, at).split('\n').slice(-linesBefore).join('\n');
const place = (path: string, text: string, at: number): string => `${path}:${text.slice(0, at).split('\n').length}`;

it('a client of a server lies in an Outside', () => {
  const bare = sources.flatMap((path) => {
    const text = read(path);
    return [...text.matchAll(clients)].flatMap(({ index }) =>
      /new Outside\([^;]*$/.test(before(text, index)) ? [] : [place(path, text, index)],
    );
  });
  expect(
    bare,
    'write new Outside(what, new Client(...)) of @kvtier/errors: it cannot be waited for without a limit',
  ).toEqual([]);
});

it('a wait for somebody else has a limit', () => {
  const bare = sources.flatMap((path) => {
    const text = read(path);
    return [...text.matchAll(waits)].flatMap(({ index }) => {
      const bounded =
        /\b(within|ask)(<[^>]*>)?\([^;]*$/.test(before(text, index)) ||
        /^[^;]*AbortSignal\.timeout\(/.test(text.slice(index));
      return bounded ? [] : [place(path, text, index)];
    });
  });
  expect(bare, 'put it into within(what, limitMs, ...) of @kvtier/errors').toEqual([]);
});
