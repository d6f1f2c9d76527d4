/**
 * The connector for vLLM, played by an engine of our own that makes vLLM's calls in their order (docs/vllm.md); more in
 * vllm-contract.long.test.ts.
 */
import { it } from 'vitest';
import { hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { runs } from './python.ts';

it('its parts by themselves', () =>
  runs('test_vllm_parts test_vllm_arenas test_vllm_filled test_vllm_names test_vllm_heads test_vllm_processors'));
it('no callback raises into the engine, whatever of ours does', () => runs('test_vllm_guards'));
it('every shape of an engine loads what another one stored, and has the tokens of an engine alone', () =>
  runs('test_vllm_connector.Shapes'));
it('requests that are special are neither loaded nor stored, and nothing of them is left', () =>
  runs('test_vllm_connector.Requests'));
it('whatever the node does, no request fails and no token differs', () => runs('test_vllm_connector.Faults'));
it('beside other connectors, for streaming sessions, and where the engine lacks a class', () =>
  runs('test_vllm_beside'));
it('called as newer versions of vLLM call it: failures by request, tables asked for, blocks waited for', () =>
  runs('test_vllm_versions'));
it("vLLM's native offloading over a node: what is told a hit is leased, and every job ends", () =>
  runs('test_vllm_offloading'));
it('a decode pod waits for a promise and no longer, hints are heeded, slow loads not begun, a long prompt costs its blocks', () =>
  runs('test_vllm_handed'));
it('what was pinned for a decode pod is let go when it has loaded, and nothing is awaited of a node that is no peer', () =>
  runs('test_vllm_pins'));
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
