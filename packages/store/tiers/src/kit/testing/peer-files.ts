/**
 * A giving node as a process of its own, for want of descriptors: `peer-files.ts DIR`, under a small RLIMIT_NOFILE. Prints its two ports.
 * Lines on stdin: `fill` takes all descriptors that are left, `free` gives them back; `cpu` takes none. Each is answered by the
 * milliseconds of CPU time that the process has used.
 */
import { closeSync, openSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { GivingNode } from '../../peer/testing/peer-pair.ts';
import { TestBench } from './objects.ts';

const bench = new TestBench(4 << 20, process.argv[2]!);
const node = await GivingNode.open(bench);
const files: number[] = [];
process.stdout.write(`${node.server.port} ${node.server.dataPort}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  try {
    while (line === 'fill') files.push(openSync('/dev/null', 'r'));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EMFILE') throw error;
  }
  if (line === 'free') for (const file of files.splice(0)) closeSync(file);
  const { user, system } = process.cpuUsage();
  process.stdout.write(`${(user + system) / 1000}\n`);
}
process.exit(0);
