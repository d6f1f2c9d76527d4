import { expect, it } from 'vitest';
import { humanLine, jsonLine } from './log-lines.ts';

it('turns a service’s JSON into a line for a person', () => {
  const line = '{"level":40,"time":1,"pid":7,"name":"cache-node","tier":"disk","blocks":3,"msg":"out of service"}';
  expect(humanLine('cache-node', line)).toBe(
    '[cache-node] 1970-01-01T00:00:00.001Z warn: out of service tier=disk blocks=3',
  );
  expect(humanLine('cache-node', '{"time":1e300,"msg":"x"}')).toBe('[cache-node] info: x');
  expect(jsonLine('cache-node', line)).toBe(line);
});

it('passes what is not JSON with the service’s name', () => {
  expect(humanLine('engine-worker', 'Segmentation fault')).toBe('[engine-worker] Segmentation fault');
  expect(humanLine('engine-worker', '{broken')).toBe('[engine-worker] {broken');
  expect(JSON.parse(jsonLine('engine-worker', 'boom'))).toMatchObject({
    level: 50,
    name: 'engine-worker',
    msg: 'boom',
  });
  for (const line of ['{ code: 1', '{"level":40,"msg":"cut of'])
    expect(JSON.parse(jsonLine('engine-worker', line))).toMatchObject({ level: 50, name: 'engine-worker', msg: line });
});

it('says which member of several a line is of', () => {
  const line = '{"level":40,"name":"cache-node","msg":"out of service"}';
  expect(humanLine('cache-node-1', line)).toBe('[cache-node-1] warn: out of service');
  expect(JSON.parse(jsonLine('cache-node-1', line))).toEqual({ member: 'cache-node-1', ...JSON.parse(line) });
  expect(JSON.parse(jsonLine('cache-node-1', '{}'))).toEqual({ member: 'cache-node-1' });
});
