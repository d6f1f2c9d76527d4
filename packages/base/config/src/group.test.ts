/** Groups by name and number; and the pod of docs/sidecar.md has a configuration that a node takes. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { expect, it } from 'vitest';
import { groupSchema, readGroup } from './group.ts';
import { cacheNodeSchema, parseConfig } from './index.ts';

it('is a number, or a name that the system knows', () => {
  const folder = mkdtempSync(path.join(tmpdir(), 'kvtier-group-'));
  const file = path.join(folder, 'group');
  writeFileSync(file, 'root:x:0:\nkv:x:2000:a,b\n');
  try {
    expect([null, 7, 'root', 'kv'].map((group) => readGroup(group, file))).toEqual([null, 7, 0, 2000]);
    expect(() => readGroup('2000', file)).toThrow(/group: .* has no group "2000"/);
  } finally {
    rmSync(folder, { recursive: true });
  }
  for (const bad of ['', 'a:b', 'a b', -1, 1.5, 2 ** 32 - 1]) expect(groupSchema.safeParse(bad).success).toBe(false);
});

it('the pod in infra/kubernetes is configured as the schema has it', () => {
  const text = readFileSync(new URL('../../../../infra/kubernetes/sidecar.yaml', import.meta.url), 'utf8');
  const json = /KVTIER_CONFIG\n\s+value: \|\n([\s\S]*?\n {12}\})/.exec(text)![1]!;
  const config = parseConfig(cacheNodeSchema, JSON.parse(json), 'test');
  expect(config).toMatchObject({ group: 2000, socketPath: '/kvtier/run/node.sock', arena: { dir: '/kvtier' } });
  const { host, port, trustedNetwork } = config.operations!;
  expect([host, trustedNetwork]).toEqual(['0.0.0.0', true]); // a kubelet asks from outside of the pod, and shows nothing
  expect(text).toContain(`{ name: operations, containerPort: ${port} }`);
  expect(text).toContain(`prometheus.io/port: "${port}"`);
  const probes = [...text.matchAll(/(\w+)Probe:\n +httpGet: \{ path: (\S+), port: operations \}/g)];
  expect(probes.map(([, probe, path]) => [probe, path])).toEqual([
    ['startup', '/health/ready'],
    ['liveness', '/health/live'],
  ]);
  expect(text).toContain(`supplementalGroups: [${config.group}]`);
  expect(text).toContain(`"socket": "${config.socketPath}", "group": "${config.group}"`);
});
