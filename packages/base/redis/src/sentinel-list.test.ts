/** Which Sentinels stay in the list. */
import type { Redis } from 'ioredis';
import { expect, it } from 'vitest';
import { type Listing, type Place, placeOf, SentinelList } from './sentinel-list.ts';

const place = (host: string): Place => ({ host, port: 1 });

/** A list of these, and the answers of Sentinels that are asked; each comes when its promise is fulfilled. */
function listOf(...hosts: string[]) {
  const sentinels = hosts.map(place);
  const answers = new Map<string, Promise<readonly string[]>>();
  const listing: Listing = {
    sentinelIterator: {
      sentinels,
      cursor: 0,
      add: (sentinel) => {
        if (sentinels.some((one) => placeOf(one) === placeOf(sentinel))) return false;
        sentinels.push(sentinel);
        return true;
      },
    },
    async updateSentinels({ options }) {
      for (const host of await answers.get(options.host!)!) this.sentinelIterator.add(place(host));
    },
  };
  const gone: string[] = [];
  const list = new SentinelList(listing, (which) => gone.push(which));
  const ask = (host: string, answer: readonly string[] | Promise<readonly string[]>): Promise<void> => {
    answers.set(host, Promise.resolve(answer));
    return listing.updateSentinels({ options: place(host), stream: {} } as Redis);
  };
  return { list, ask, gone, names: () => sentinels.map(({ host }) => host) };
}

it('who is named by none any more goes; whom one that does not answer had named is named by none', async () => {
  const { list, ask, gone, names } = listOf('a', 'b');
  await ask('a', ['b', 'c']);
  await ask('b', ['a', 'd']);
  expect(names()).toEqual(['a', 'b', 'c', 'd']);
  await ask('a', ['b']);
  expect(names()).toEqual(['a', 'b', 'd']);
  list.failed(place('b'));
  await ask('a', ['b']);
  expect([names(), gone]).toEqual([
    ['a', 'b'],
    ['c:1', 'd:1'],
  ]);
});

it('one that has gone while it was asked names nobody', async () => {
  const { ask, names } = listOf('a');
  await ask('a', ['b']);
  let answer: (named: readonly string[]) => void = () => {};
  const asked = ask('b', new Promise<readonly string[]>((resolve) => (answer = resolve)));
  await ask('a', ['c']);
  expect(names()).toEqual(['a', 'c']);
  answer(['a', 'd']);
  await asked;
  await ask('a', ['c']);
  expect(names()).toEqual(['a', 'c']);
});
