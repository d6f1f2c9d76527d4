/** The connector for vLLM, played by an engine of our own that makes vLLM's calls in their order (docs/vllm.md). */
import { it } from 'vitest';
import { hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { runs } from './python.ts';

it('its parts by themselves', () => runs('test_vllm_parts'));
it('each block that a step filled is offered once, with its own id', () => runs('test_vllm_filled'));
it('every shape of an engine loads what another one stored, and has the tokens of an engine alone', () =>
  runs('test_vllm_connector.Shapes'));
it('requests that are special are neither loaded nor stored, and nothing of them is left', () =>
  runs('test_vllm_connector.Requests'));
it('whatever the node does, no request fails and no token differs', () => runs('test_vllm_connector.Faults'));
it('KV in the memory of a GPU, on the emulator, is stored and loaded alike', () => runs('test_vllm_gpu'));
it("vLLM's native offloading over a node: what is told a hit is leased, and every job ends", () =>
  runs('test_vllm_offloading'));
it('a decode pod waits for what a prefill pod promised, and no longer', () => runs('test_vllm_handed.Handed'));
it('an orchestrator that is trusted may keep what it will need', () => runs('test_vllm_handed.Hinted'));
it('a load that computing would beat is not begun', () => runs('test_vllm_handed.Planned'));
it('what a prompt of 32k tokens costs the loop of the engine grows with its blocks alone', () =>
  runs('test_vllm_handed.Cost', { env: { PYTHONMALLOC: 'pymalloc' } }));
it.skipIf(hostsMissing() !== undefined)(
  'what an engine on one host computed, one on another host loads, until that host is gone',
  async () => {
    const names = ['a', 'b'] as const;
    const cluster = await hosts(names);
    try {
      const each = names.map((name) => ({ prefix: cluster.prefix(name), address: cluster.address(name) }));
      await runs('test_vllm_hosts', { env: { KVTIER_TEST_HOSTS: JSON.stringify(each) } });
    } finally {
      await cluster.close();
    }
  },
);
