/** A shared secret is changed while nodes run, host by host: nobody is cut off, and who has only the old one is a stranger afterwards. */
import { connect } from 'node:net';
import type { Log } from '@kvtier/runtime';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import type { PeerSecurity } from './control.ts';
import type { PeerTier } from './peer-tier.ts';
import { OlderPeer } from './testing/older-peer.ts';
import { type GivingNode, until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 4 }, (_, i) => hashNamed(i));
const [old, fresh] = ['o', 'n'].map((letter) => `${letter.repeat(40)}\n`) as [string, string];
let rig: PeerRig;
beforeEach(() => {
  rig = new PeerRig();
});
afterEach(() => rig.end());

/** As `readPeerCredentials` has it: each line with and without its line break. */
const secretsIn = (file: string): readonly Buffer[] =>
  file
    .split(/(?<=\n)/)
    .flatMap((line) => [line, line.endsWith('\n') ? line.trim() : `${line}\n`].map((each) => Buffer.from(each)));

/** A host's file, and what its node makes of it. */
class Host {
  file: string;
  readonly warnings: unknown[] = [];
  readonly log: Log = { info: () => {}, warn: (details: object) => this.warnings.push(details), error: () => {} };

  constructor(file: string) {
    this.file = file;
  }

  get security(): PeerSecurity {
    const host = this;
    return {
      encryption: 'none',
      get secrets() {
        return secretsIn(host.file);
      },
    };
  }
}

async function give(host: Host): Promise<GivingNode> {
  const node = await rig.give({ security: host.security, log: host.log, heartbeatMs: 50 });
  await node.bench.write(node.bench.tier, space, chain, 8_000);
  return node;
}

const fetchFrom = ({ security, log }: Host, { server }: GivingNode): PeerTier =>
  rig.fetchFrom([server.port], { security, log }).tier;

const isThere = (tier: PeerTier): boolean => tier.lookup(space, chain) === 4 && tier.stats().detail!.usable_peers === 1;

it.each([
  ['the new one first', `${fresh}${old}`, ['giver', 'fetcher']],
  ['the new one first, the other host before', `${fresh}${old}`, ['fetcher', 'giver']],
  ['the old one first', `${old}${fresh}`, ['giver', 'fetcher']],
  ['the old one first, the other host before', `${old}${fresh}`, ['fetcher', 'giver']],
  ['in files without a line break at their end', `${fresh}${old.trim()}`, ['giver', 'fetcher']],
] as const)(
  'two in a file, %s: at each step peers connect, and those that are connected stay',
  async (_, both, order) => {
    const hosts = { giver: new Host(old), fetcher: new Host(old) };
    const node = await give(hosts.giver);
    const standing = fetchFrom(hosts.fetcher, node);
    await until('they are connected', () => isThere(standing));
    for (const file of [both, fresh])
      for (const name of order) {
        hosts[name].file = file;
        const tier = fetchFrom(hosts.fetcher, node);
        await until(`a connection when the ${name} has its file`, () => isThere(tier));
        expect(await rig.bench.read(tier, space, chain, 8_000)).toEqual(chain.map(() => 'ready'));
      }
    expect(await rig.bench.read(standing, space, chain, 8_000)).toEqual(chain.map(() => 'ready'));
    expect([hosts.giver.warnings, hosts.fetcher.warnings, node.server.refusedCount]).toEqual([[], [], 0]);

    const late = fetchFrom(new Host(old), node);
    await until('the old one is refused', () => node.server.counts.refused >= 2);
    expect(late.stats().outOfServiceReason).toMatch(/it does not prove the secret; give all nodes the same secret/);
  },
);

it('an older node, which knows of one secret, is shown the first', async () => {
  const host = new Host(`${old}${fresh}`);
  const node = await give(host);
  const comes = async (secret: string): Promise<OlderPeer> => {
    const socket = connect({ host: '127.0.0.1', port: node.server.port });
    rig.onEnd(() => socket.destroy());
    const older = new OlderPeer(socket, Buffer.from(secret));
    await older.prove();
    return older;
  };
  const older = await comes(old);
  await until('it is told', () => older.told.some(({ kind }) => kind === 9));
  await expect(comes(fresh)).rejects.toThrow('it does not prove the secret');
  host.file = `${fresh}${old}`;
  await comes(fresh);
  expect([older.refused, older.ended, node.server.counts.peers]).toEqual([undefined, false, 2]);
});
