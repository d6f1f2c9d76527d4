/** SGLang's third tier, played: its calls in their order, against host pools in its layouts (docs/sglang.md). */
import { it } from 'vitest';
import { runs } from './python.ts';

it('its parts by themselves', () => runs('test_sglang_parts test_sglang_names'));
it('every layout of a host pool, ranks, tensors and pools beside the KV: what one engine stored another loads', () =>
  runs('test_sglang_storage.Shapes'));
it('after a flush or a clear nothing older is loaded', () => runs('test_sglang_flushes.Generations'));
it('any run of calls brings what a table of pages says', () => runs('test_sglang_storage.Oracle'));
it('whatever the node does, no call fails or hangs and no page is wrong', () => runs('test_sglang_storage.Faults'));
