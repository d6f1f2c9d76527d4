/**
 * A giving node as a process of its own, for tests that kill and stop it: `peer-giver.ts DIR PORT BLOCKS PAYLOAD_BYTES [HOST [tls]]`;
 * prints its port. `tls`: with the certificates in DIR.
 */
import { join } from 'node:path';
import { certificatesIn } from '../../kit/testing/certificates.ts';
import { hashNamed, namespaceNamed, TestBench } from '../../kit/testing/objects.ts';
import { GivingNode, sharedSecret } from './peer-pair.ts';

const [dir, port, blocks, payloadBytes, host = '127.0.0.1', encryption] = process.argv.slice(2);
const security = encryption === 'tls' ? certificatesIn(dir!) : sharedSecret();
const bench = new TestBench(64 << 20, join(dir!, `giver-${process.pid}`));
const hashes = Array.from({ length: Number(blocks) }, (_, i) => hashNamed(i));
for (const hash of hashes) await bench.write(bench.tier, namespaceNamed('one'), [hash], Number(payloadBytes));
const node = await GivingNode.open(bench, { security, host, port: Number(port), heartbeatMs: 300 });
process.stdout.write(`${node.server.port}\n`);
process.stdin.resume().once('end', () => process.exit(0));
