/** All of infra/kubernetes: what its files say of each other, of the services' configurations and of the restricted standard is so. */
import { readdirSync, readFileSync } from 'node:fs';
import { loadAllYaml } from '@kubernetes/client-node';
import { cacheNodeSchema, coordinatorSchema, parseConfig } from '@kvtier/config';
import { describe, expect, it } from 'vitest';

interface Probe {
  readonly httpGet?: { readonly path: string; readonly port: string };
  readonly exec?: { readonly command: readonly string[] };
  readonly periodSeconds: number;
  readonly failureThreshold: number;
  readonly terminationGracePeriodSeconds?: number;
}
interface Container {
  readonly name: string;
  readonly image: string;
  readonly command?: readonly string[];
  readonly args?: readonly string[];
  readonly restartPolicy?: string;
  readonly env?: readonly { readonly name: string; readonly value: string }[];
  readonly ports?: readonly { readonly name: string; readonly containerPort: number }[];
  readonly securityContext?: {
    readonly runAsUser?: number;
    readonly runAsNonRoot?: boolean;
    readonly allowPrivilegeEscalation?: boolean;
    readonly readOnlyRootFilesystem?: boolean;
    readonly capabilities?: { readonly drop?: readonly string[]; readonly add?: readonly string[] };
  };
  readonly startupProbe?: Probe;
  readonly livenessProbe?: Probe;
  readonly readinessProbe?: Probe;
  readonly lifecycle?: { readonly preStop: { readonly exec: { readonly command: readonly string[] } } };
  readonly volumeMounts: readonly { readonly name: string; readonly mountPath: string }[];
}
interface Compose {
  readonly services: Readonly<
    Record<
      string,
      {
        readonly image: string;
        readonly environment?: { readonly KVTIER_CONFIG: string };
        readonly volumes?: readonly string[];
      }
    >
  >;
}
interface Pod {
  readonly containers: readonly Container[];
  readonly initContainers?: readonly Container[];
  readonly terminationGracePeriodSeconds: number;
  readonly volumes: readonly {
    readonly name: string;
    readonly hostPath?: { readonly path: string; readonly type: string };
  }[];
  readonly securityContext?: {
    readonly runAsNonRoot?: boolean;
    readonly seccompProfile?: { readonly type: string };
    readonly supplementalGroups?: readonly number[];
    readonly fsGroup?: number;
  };
}
type Labels = Readonly<Record<string, string>>;
interface Template {
  readonly metadata: { readonly labels: Labels; readonly annotations: Labels };
  readonly spec: Pod;
}
interface Manifest {
  readonly kind: string;
  readonly metadata: { readonly name: string };
  readonly data: Labels;
  readonly spec: {
    readonly template: Template;
    readonly selector: {
      readonly matchLabels: Labels;
      readonly matchExpressions: readonly { readonly values: readonly string[] }[];
    };
    readonly podSelector: { readonly matchLabels: Labels };
    readonly ingress: readonly { readonly ports: readonly { readonly port: number }[] }[];
    readonly podMetricsEndpoints: readonly { readonly port: string }[];
  };
}

const infra = new URL('../../../../../infra/', import.meta.url);
const textOf = (file: string): string => readFileSync(new URL(file, infra), 'utf8');
const files = readdirSync(new URL('kubernetes/', infra)).map((name) => {
  const text = textOf(`kubernetes/${name}`);
  return { name, text, manifests: loadAllYaml(text) as Manifest[] };
});
const all = files.flatMap(({ name, text, manifests }) => manifests.map((manifest) => ({ name, text, manifest })));
const workloads = all.filter(({ manifest }) => ['Deployment', 'DaemonSet', 'StatefulSet'].includes(manifest.kind));
const containersOf = ({ spec }: Template): Container[] => [...(spec.initContainers ?? []), ...spec.containers];
const named = (name: string): Template =>
  workloads.find(({ manifest }) => manifest.metadata.name === name)!.manifest.spec.template;
const portsOf = (template: Template): Map<string, number> =>
  new Map(
    containersOf(template).flatMap(({ ports = [] }) => ports.map(({ name, containerPort }) => [name, containerPort])),
  );

/** https://kubernetes.io/docs/concepts/security/pod-security-standards, and a root file system that is only read. */
function beyondStandard(pod: Pod, { securityContext: own = {} }: Container): string[] {
  const { drop = [], add = [] } = own.capabilities ?? {};
  const kept = {
    seccompProfile: pod.securityContext?.seccompProfile?.type === 'RuntimeDefault',
    allowPrivilegeEscalation: own.allowPrivilegeEscalation === false,
    capabilities: drop.join() === 'ALL' && add.length === 0,
    runAsNonRoot: (own.runAsNonRoot ?? pod.securityContext?.runAsNonRoot) === true && own.runAsUser !== 0,
    readOnlyRootFilesystem: own.readOnlyRootFilesystem === true,
  };
  return Object.entries(kept).flatMap(([what, is]) => (is ? [] : [what]));
}

it('every container keeps to the restricted standard, or its file says why not', () => {
  expect(workloads.length).toBeGreaterThan(2);
  const wrong = workloads.flatMap(({ name, text, manifest: { spec } }) =>
    containersOf(spec.template).flatMap((container) => {
      const beyond = beyondStandard(spec.template.spec, container);
      const isSaid = new RegExp(`^# Not restricted \\(${container.name}\\): .+`, 'm').test(text);
      if (beyond.length > 0 === isSaid) return [];
      return [`${name}, ${container.name}: ${beyond.join(', ') || 'keeps to it, and the file says that it does not'}`];
    }),
  );
  expect(wrong).toEqual([]);
  // Whatever is said: no container may do more than it needs.
  for (const { manifest } of workloads)
    for (const { securityContext: own } of containersOf(manifest.spec.template))
      expect([own?.allowPrivilegeEscalation, own?.capabilities?.drop]).toEqual([false, ['ALL']]);
});

it('what is mounted is there, and what is selected too', () => {
  for (const { manifest } of workloads) {
    const { template, selector } = manifest.spec;
    const volumes = template.spec.volumes.map(({ name }) => name);
    for (const { volumeMounts } of containersOf(template))
      for (const { name } of volumeMounts) expect(volumes).toContain(name);
    expect(template.metadata.labels).toMatchObject(selector.matchLabels);
  }
});

const workdirs = [...textOf('Dockerfile').matchAll(/^WORKDIR (\S+)$/gm)].map(([, folder]) => folder!);
/** Where the image has its programs, and starts them. */
const imageDir = workdirs.at(-1)!;

const isBelow = (path: string, folder: string): boolean => `${path}/`.startsWith(folder === '/' ? '/' : `${folder}/`);
/** Over the image's folder, in it, or above it. */
const isOverImage = (path: string): boolean => isBelow(path, imageDir) || isBelow(imageDir, path);

it('the image has its programs where they were built: bundles name that folder', () => {
  expect(workdirs).toEqual([imageDir, imageDir]);
  expect(textOf('Dockerfile')).toContain(`\nCOPY --from=build ${imageDir} ${imageDir}\n`);
});

it('no mount hides the programs of the image', () => {
  const ours = workloads.flatMap(({ manifest: { spec } }) =>
    containersOf(spec.template).filter(({ image }) => image.startsWith('kvtier:')),
  );
  expect(ours.map(({ name }) => name).toSorted()).toEqual(['cache-node', 'cache-node', 'coordinator', 'folders']);
  const paths = ours.flatMap(({ volumeMounts }) => volumeMounts.map(({ mountPath }) => mountPath));
  expect(paths.filter(isOverImage)).toEqual([]);
});

it('compose mounts nothing over the image, and finds the model in it', () => {
  const [compose] = loadAllYaml(textOf('../docker-compose.yml')) as [Compose];
  const models = Object.values(compose.services).flatMap(({ image, environment, volumes = [] }) => {
    if (!image.startsWith('kvtier:')) return [];
    expect(volumes.map((volume) => volume.split(':')[1]!).filter(isOverImage)).toEqual([]);
    const config = JSON.parse(environment?.KVTIER_CONFIG ?? '{}') as { readonly modelDir?: string };
    return config.modelDir === undefined ? [] : [config.modelDir];
  });
  expect(models).toEqual(Array.from({ length: 3 }, () => `${imageDir}/models/demo/model`));
});

it('infra/README.md lists every file', () => {
  const page = textOf('README.md');
  expect(files.filter(({ name }) => !page.includes(`\`kubernetes/${name}\``)).map(({ name }) => name)).toEqual([]);
});

describe.each([
  ['engine-with-kvtier', 'sidecar.yaml'],
  ['kvtier-cache-node', 'cache-node.yaml'],
])('%s', (workload) => {
  const { metadata, spec } = named(workload);
  const node = containersOf({ metadata, spec }).find(({ name }) => name === 'cache-node')!;
  const text = node.env!.find(({ name }) => name === 'KVTIER_CONFIG')!.value;
  const config = parseConfig(cacheNodeSchema, JSON.parse(text), workload);
  const { host, port, trustedNetwork } = config.operations!;

  it('is configured as the schema has it', () => {
    expect(config).toMatchObject({ group: 2000, socketPath: '/kvtier/run/node.sock', arena: { dir: '/kvtier' } });
    expect([host, trustedNetwork]).toEqual(['0.0.0.0', true]);
  });

  it('is scraped where it listens', () => {
    expect(portsOf({ metadata, spec }).get('operations')).toBe(port);
    expect(metadata.annotations['prometheus.io/port']).toBe(String(port));
  });

  it('is killed soon where it stands still, and has the 8 s of its end', () => {
    const seconds = node.livenessProbe!.terminationGracePeriodSeconds;
    expect(seconds).toBeGreaterThan(8);
    expect(seconds).toBeLessThan(15);
  });

  it('writes to what is mounted alone, and lets the node make the folder of its socket', () => {
    const paths = node.volumeMounts.map(({ mountPath }) => mountPath);
    for (const path of [config.socketPath, config.dataDir, `${config.arena.dir}/arena`])
      expect(paths.filter((mounted) => path.startsWith(`${mounted}/`))).toHaveLength(1);
    expect(paths).not.toContain(config.socketPath.slice(0, config.socketPath.lastIndexOf('/')));
  });
});

it('no node of a host writes to a disk whose device is not mounted', () => {
  const { hostPath } = named('kvtier-cache-node').spec.volumes.find(({ name }) => name === 'data')!;
  expect(hostPath).toEqual({ path: '/var/lib/kvtier/disk', type: 'Directory' }); // a folder of the device itself
});

describe('an engine and the node beside it', () => {
  const template = named('engine-with-kvtier');
  const [node, engine] = containersOf(template) as [Container, Container];
  const args = engine.args!.join('\n');

  it('starts whatever the node does', () => {
    expect(node.restartPolicy).toBe('Always');
    // Either would keep the engine from starting, or the pod from being ready.
    expect([node.startupProbe, node.readinessProbe, node.livenessProbe!.httpGet]).toEqual([
      undefined,
      undefined,
      undefined,
    ]);
    expect(node.command).toEqual(['tini', '-g', '--', 'sh', '-c']);
    const programs = textOf('Dockerfile').match(/--m\w+-semi-space-size=\d+/g)!;
    expect(node.args![0]).toContain(`node ${programs.join(' ')} build/programs/services/cache-node/main.mjs`);
  });

  it('is asked for life where it listens', () => {
    const config = JSON.parse(node.env![0]!.value) as { readonly operations: { readonly port: number } };
    expect(node.livenessProbe!.exec!.command.at(-1)).toContain(
      `http://127.0.0.1:${config.operations.port}/health/live`,
    );
    for (const probe of [engine.startupProbe!, engine.readinessProbe!])
      expect(probe.httpGet).toEqual({ path: '/health', port: 'http' });
  });

  it('has its socket, its group and one root of block hashes', () => {
    const { socketPath, group } = JSON.parse(node.env![0]!.value) as Record<string, string>;
    expect(args).toContain(`"socket": "${socketPath}", "group": "${group}"`);
    expect(template.spec.securityContext).toMatchObject({
      supplementalGroups: [Number(group)],
      fsGroup: Number(group),
    });
    expect(engine.env).toContainEqual({ name: 'PYTHONHASHSEED', value: '0' });
    expect(textOf('engine.Dockerfile')).toMatch(/^ENV PYTHONHASHSEED=0$/m);
  });

  it('ends after what runs has had its time', () => {
    const seconds = Number(engine.lifecycle!.preStop.exec.command[1]);
    const drain = Number(/--shutdown-timeout=(\d+)/.exec(args)![1]);
    expect(template.spec.terminationGracePeriodSeconds).toBeGreaterThan(seconds + drain + 8);
  });

  it('is found by the coordinator, and its KV events are read', () => {
    const json = all.find(({ manifest }) => manifest.kind === 'ConfigMap')!.manifest.data['coordinator.json']!;
    const { discovery, tokenizers } = parseConfig(coordinatorSchema, JSON.parse(json), 'coordinator.json');
    if (discovery?.kind !== 'kubernetes') throw new Error('the coordinator looks for pods');
    const [label, value] = discovery.pods.split('=');
    expect(template.metadata.labels[label!]).toBe(value);
    const ports = portsOf(template);
    expect([ports.get('http'), ports.get('kv-events'), ports.get('kv-replay')]).toEqual([
      discovery.ports[0],
      discovery.eventsPort,
      discovery.replayPort,
    ]);
    expect(args).toContain(`--port=${discovery.ports[0]}`);
    expect(args).toContain(`"endpoint": "tcp://*:${discovery.eventsPort}"`);
    expect(args).toContain(`"replay_endpoint": "tcp://*:${discovery.replayPort}"`);
    const name = /--served-model-name=(\S+)/.exec(args)![1]!;
    expect(tokenizers).toEqual({ [name]: engine.command!.at(-1) });
  });
});

it('policies let in what listens, and nothing else', () => {
  const policies = all.filter(({ manifest }) => manifest.kind === 'NetworkPolicy').map(({ manifest }) => manifest.spec);
  expect(policies).toHaveLength(workloads.length);
  for (const { manifest } of workloads) {
    const { template } = manifest.spec;
    const isSelected = ({ podSelector }: (typeof policies)[number]): boolean =>
      Object.entries(podSelector.matchLabels).every(([label, value]) => template.metadata.labels[label] === value);
    const policy = policies.filter(isSelected);
    expect(policy, manifest.metadata.name).toHaveLength(1);
    const open = new Set(policy[0]!.ingress.flatMap(({ ports }) => ports.map(({ port }) => port)));
    expect([...open].toSorted()).toEqual([...portsOf(template).values()].toSorted());
  }
});

it('policies name whatever listens, by a rule or by one that is left out', () => {
  const page = readFileSync(new URL('../docs/cluster.md', infra), 'utf8');
  const table = page.slice(page.indexOf('| who | listens |')).split('\n\n')[0]!;
  const listeners = table.split('\n').slice(2);
  expect(listeners.length).toBeGreaterThan(6);
  const text = textOf('kubernetes/network-policy.yaml').toLowerCase();
  const missing = listeners.map((row) => row.split('|')[1]!.trim().toLowerCase()).filter((who) => !text.includes(who));
  expect(missing).toEqual([]);
});

it('metrics are asked of ports that there are', () => {
  const { selector, podMetricsEndpoints } = all.find(({ manifest }) => manifest.kind === 'PodMonitor')!.manifest.spec;
  const apps = workloads.map(({ manifest }) => manifest.spec.template.metadata.labels.app!);
  expect(selector.matchExpressions[0]!.values.toSorted()).toEqual(apps.toSorted());
  const names = new Set(workloads.flatMap(({ manifest }) => [...portsOf(manifest.spec.template).keys()]));
  for (const { port } of podMetricsEndpoints) expect(names).toContain(port);
});

it('a coordinator may be taken away, and another one stays', () => {
  const budget = all.find(({ manifest }) => manifest.kind === 'PodDisruptionBudget')!.manifest.spec;
  expect(named('kvtier-coordinator').metadata.labels).toMatchObject(budget.selector.matchLabels);
});
