/** Where a member's events are heard, and under which key. */
import { expect, it } from 'vitest';
import { announcedEvents } from './published-events.ts';

const own = { endpoint: 'tcp://10.0.0.1:1', replayEndpoint: null, topic: 'kv' };
const elsewhere = { endpoint: 'tcp://host:1', replayEndpoint: null, topic: '' };
const published = (serverKey: string | null) => ({ ...own, serverKey, onServerKey: () => {} });

it.each<[string, Parameters<typeof announcedEvents>, object | null]>([
  ['none', [undefined, null], null],
  ['none, as configured', [null, published('k')], null],
  ['where it publishes', [undefined, published(null)], own],
  ['with its key', [undefined, published('k')], { ...own, serverKey: 'k' }],
  ['as configured, with its key', [elsewhere, published('k')], { ...elsewhere, serverKey: 'k' }],
  ['as configured, key and all', [{ ...elsewhere, serverKey: 'c' }, published('k')], { ...elsewhere, serverKey: 'c' }],
  ["somebody else's", [elsewhere, null], elsewhere],
])('%s', (_, [configured, from], expected) => {
  expect(announcedEvents(configured, from)).toEqual(expected);
});
