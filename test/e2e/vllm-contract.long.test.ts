/** The connector for vLLM, played as in vllm-contract.slow.test.ts: what there is much of. */
import { it } from 'vitest';
import { runs } from './python.ts';

it('edges of what may be claimed and stored: one rank, one step or one block unlike the others', () =>
  runs('test_vllm_edges'));
it('whoever waits in a long queue loses no hit by that', () => runs('test_vllm_queues'));
it('KV in the memory of a GPU, on the emulator, is stored and loaded alike', () => runs('test_vllm_gpu'));
