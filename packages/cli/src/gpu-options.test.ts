import { expect, it } from 'vitest';
import { gpuFlags } from './gpu-options.ts';

it('nothing said is nothing set', () => expect(gpuFlags({})).toEqual({}));

it('flags become settings of the engine worker', () => {
  const values = { gpu: '1', 'gpu-memory-utilization': '0.5', dtype: 'f16', 'kv-dtype': 'e4m3', 'equal-bits': true };
  const flags = { device: 1, memoryUtilization: 0.5, computeDtype: 'f16', kvDtype: 'e4m3', equalBits: true };
  expect(gpuFlags(values)).toEqual(flags);
});

it.each([
  [{ gpu: '-1' }, '--gpu: "-1" is not the number of a GPU, from 0 on'],
  [{ 'gpu-memory-utilization': '0' }, '--gpu-memory-utilization: "0" is not a share above 0 and at most 1'],
  [{ 'gpu-memory-utilization': '1.1' }, '--gpu-memory-utilization: "1.1" is not a share above 0 and at most 1'],
  [{ 'gpu-memory-utilization': 'x' }, '--gpu-memory-utilization: "x" is not a share above 0 and at most 1'],
  [{ dtype: 'int8' }, '--dtype: "int8" is not one of bf16, f16, f32'],
  [{ 'kv-dtype': 'bf16' }, '--kv-dtype: "bf16" is not e4m3'],
])('%o is refused', (values, message) => {
  expect(() => gpuFlags(values)).toThrow(message);
});
