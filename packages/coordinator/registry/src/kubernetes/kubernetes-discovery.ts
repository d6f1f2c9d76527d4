/**
 * Members as Kubernetes has them: pods by label, and EndpointSlices where the configuration asks for them, each by list and watch.
 * Nothing is told before all of it has been listed once.
 */
import type { KubernetesDiscoveryConfig } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';
import type { Discovery, DiscoveryListener } from '../discovery.ts';
import { Told } from '../told.ts';
import { ApiServerLink } from './api-server-link.ts';
import { membersOf } from './members.ts';
import { type EndpointSlice, type Pod, parsePod, parseSlice } from './objects.ts';
import { Watched } from './watched.ts';

/** Changes that come together are told together. */
const gatherMs = 20;
/** Lines about objects that are none, remembered so that each is said once. */
const maxLines = 1_000;

export class KubernetesDiscovery implements Discovery {
  readonly kind = 'kubernetes';
  readonly #config: Omit<KubernetesDiscoveryConfig, 'kind'>;
  readonly #log: Log;
  #told: Told | undefined;
  #pods: Watched<Pod> | undefined;
  #slices: Watched<EndpointSlice> | undefined;
  /** By kind of object. */
  readonly #problems = new Map<string, string>();
  readonly #lines = new Set<string>();
  #timer: NodeJS.Timeout | undefined;

  constructor(config: Omit<KubernetesDiscoveryConfig, 'kind'>, log: Log) {
    this.#config = config;
    this.#log = log;
  }

  async start(listener: DiscoveryListener): Promise<void> {
    const link = await ApiServerLink.open(this.#config);
    this.#told = new Told(listener, this.#log);
    const { pods, endpointSlices } = this.#config;
    const namespace = encodeURIComponent(link.namespace);
    this.#pods = this.#watch(link, 'pod', `/api/v1/namespaces/${namespace}/pods`, pods, parsePod);
    if (endpointSlices === null) return;
    const path = `/apis/discovery.k8s.io/v1/namespaces/${namespace}/endpointslices`;
    this.#slices = this.#watch(link, 'endpointslice', path, endpointSlices, parseSlice);
  }

  async close(): Promise<void> {
    this.#told?.close();
    clearTimeout(this.#timer);
    await Promise.all([this.#pods?.close(), this.#slices?.close()]);
    clearTimeout(this.#timer);
  }

  #watch<T>(link: ApiServerLink, kind: string, path: string, selector: string, parse: (value: unknown) => T) {
    const { timeLimitMs, watchSeconds } = this.#config;
    return new Watched<T>({
      ...{ link, path, labelSelector: selector, parse, timeLimitMs, watchSeconds },
      changed: () => {
        this.#timer ??= setTimeout(() => this.#tell(), gatherMs);
      },
      problem: (why) => {
        if (why === undefined) this.#problems.delete(kind);
        else this.#problems.set(kind, `${kind}s of ${link.namespace} cannot be followed (${why})`);
        this.#told?.problem(this.#problems.values().next().value);
      },
      ignored: (name, why) => this.#ignore(`${kind} ${name}`, why),
    });
  }

  #tell(): void {
    this.#timer = undefined;
    const pods = this.#pods?.objects;
    const slices = this.#slices?.objects;
    if (pods === undefined || (this.#slices !== undefined && slices === undefined)) return;
    const { workers, nodes, ignored } = membersOf(pods.values(), slices?.values(), this.#config);
    for (const { name, why } of ignored) this.#ignore(`pod ${name}`, why);
    this.#told?.members({ workers, nodes });
  }

  /** One line for each reason, as long as not very many different ones come. */
  #ignore(member: string, reason: string): void {
    const line = `${member}: ${reason}`;
    if (this.#lines.has(line)) return;
    if (this.#lines.size >= maxLines) this.#lines.clear();
    this.#lines.add(line);
    this.#log.warn({ member, reason }, 'a member is ignored');
  }
}
