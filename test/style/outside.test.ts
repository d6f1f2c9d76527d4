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

/** Where the time of day is wanted itself: it is told to somebody, or compared with one that somebody told. */
const clocks = new Set([
  'packages/base/events/src/publisher.ts',
  'packages/base/runtime/src/clock.ts',
  'packages/base/telemetry/src/line-sink.ts',
  'packages/base/wire/src/grpc.ts',
  'packages/cli/src/log-lines.ts',
  'packages/cli/src/places.ts',
  'packages/coordinator/api-server/src/generation.ts',
  'packages/coordinator/api-server/src/models.ts',
  'packages/coordinator/kv-index/src/feed/index-feed.ts',
  'packages/engine/model/src/model-folder.ts',
  'packages/store/tiers/src/s3/s3-api.ts',
]);

it('nothing is measured by a clock that somebody may set', () => {
  const wrong = sources.filter((path) => /\bDate\.now\(\)|\bnew Date\(\)/.test(read(path)) && !clocks.has(path));
  expect(wrong, 'take performance.now(); the time of day may go back by an hour, and a wait with it').toEqual([]);
});
