/** All of infra/kubernetes: what its files say of each other, of the services' configurations and of the restricted standard is so. */
import { readFileSync } from 'node:fs';
import { loadAllYaml } from '@kubernetes/client-node';
import { coordinatorSchema, parseConfig } from '@kvtier/config';
import { describe, expect, it } from 'vitest';
import {
  all,
  type Compose,
  type Container,
  containersOf,
  coordinatorJson,
  files,
  infra,
  named,
  nodeConfigOf,
  type Pod,
  portsOf,
  selects,
  textOf,
  workloads,
} from '../testing/manifests.ts';

interface Scraping {
  readonly scrape_configs: readonly {
    readonly relabel_configs: readonly {
      readonly source_labels: readonly string[];
      readonly regex?: string;
      readonly action?: string;
      readonly target_label?: string;
    }[];
  }[];
}

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
  expect(ours.map(({ name }) => name).toSorted()).toEqual([
    ...Array.from({ length: 4 }, () => 'cache-node'),
    ...['coordinator', 'folders'],
  ]);
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
  ['prefill', 'prefill-decode.yaml'],
  ['decode', 'prefill-decode.yaml'],
])('%s', (workload) => {
  const { metadata, spec } = named(workload);
  const node = containersOf({ metadata, spec }).find(({ name }) => name === 'cache-node')!;
  const config = nodeConfigOf(node);
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

describe.each(['engine-with-kvtier', 'prefill', 'decode'])('%s: an engine and the node beside it', (workload) => {
  const template = named(workload);
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
    expect(node.livenessProbe!.exec!.command.at(-1)).toContain(
      `http://127.0.0.1:${nodeConfigOf(node).operations!.port}/health/live`,
    );
    for (const probe of [engine.startupProbe!, engine.readinessProbe!])
      expect(probe.httpGet).toEqual({ path: '/health', port: 'http' });
  });

  it('has its socket, its group and one root of block hashes', () => {
    const { socketPath, group } = nodeConfigOf(node);
    expect(args).toContain(`"socket": "${socketPath}", "group": "${group}"`);
    expect(template.spec.securityContext).toMatchObject({
      supplementalGroups: [Number(group)],
      fsGroup: Number(group),
    });
    expect(engine.env).toContainEqual({ name: 'PYTHONHASHSEED', value: '0' });
    expect(textOf('engine.Dockerfile')).toMatch(/^ENV PYTHONHASHSEED=0$/m);
  });

  it('keeps the digest of its weights where its container does not lose it, and no mount makes the weights others', () => {
    const place = /"weights_cache": "([^"]+)"/.exec(args)![1]!;
    const mount = engine.volumeMounts.find(({ mountPath }) => isBelow(place, mountPath))!;
    expect(mount.readOnly).toBeUndefined();
    const volume = template.spec.volumes.find(({ name }) => name === mount.name)!;
    expect([volume.emptyDir !== undefined, volume.emptyDir?.medium]).toEqual([true, undefined]);
    expect(template.spec.securityContext!.fsGroupChangePolicy).toBe('OnRootMismatch');
  });

  it('tells what of a prompt was cached', () => expect(engine.args).toContain('--enable-prompt-tokens-details'));

  it('ends after what runs has had its time', () => {
    const seconds = Number(engine.lifecycle!.preStop.exec.command[1]);
    const drain = Number(/--shutdown-timeout=(\d+)/.exec(args)![1]);
    expect(template.spec.terminationGracePeriodSeconds).toBeGreaterThan(seconds + drain + 8);
  });

  it('is found by the coordinator, and its KV events are read', () => {
    const { discovery, tokenizers } = parseConfig(coordinatorSchema, coordinatorJson(), 'coordinator.json');
    if (discovery?.kind !== 'kubernetes') throw new Error('the coordinator looks for pods');
    expect(selects(discovery.pods, template.metadata.labels)).toBe(true);
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

it('a file that is applied without policies closes nothing: all policies are in one file', () => {
  const withPolicies = files.filter(({ text }) =>
    /^\s*(- )?(apiVersion: networking\.k8s\.io|kind: NetworkPolicy)/m.test(text),
  );
  expect(withPolicies.map(({ name }) => name)).toEqual(['network-policy.yaml']);
});

it('policies let in what listens, and nothing else', () => {
  const policies = all.filter(({ manifest }) => manifest.kind === 'NetworkPolicy').map(({ manifest }) => manifest.spec);
  const selected = new Set<object>();
  for (const { manifest } of workloads) {
    const { template } = manifest.spec;
    const isSelected = ({ podSelector }: (typeof policies)[number]): boolean =>
      Object.entries(podSelector.matchLabels).every(([label, value]) => template.metadata.labels[label] === value);
    const its = policies.filter(isSelected);
    for (const policy of its) selected.add(policy);
    const open = new Set(its.flatMap(({ ingress }) => ingress.flatMap(({ ports }) => ports.map(({ port }) => port))));
    expect([...open].toSorted(), manifest.metadata.name).toEqual([...portsOf(template).values()].toSorted());
  }
  expect(policies.filter((policy) => !selected.has(policy))).toEqual([]);
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
  const asked = podMetricsEndpoints.map(({ port }) => port);
  for (const port of asked) expect(names).toContain(port);
  // Without the operator: the same pods, the same ports.
  const [{ scrape_configs: jobs }] = loadAllYaml(textOf('prometheus/scrape.yml')) as [Scraping];
  const kept = jobs[0]!.relabel_configs
    .filter(({ action }) => action === 'keep')
    .map(({ source_labels: [label], regex }) => [label, regex!.split('|').toSorted()]);
  expect(kept).toEqual([
    ['__meta_kubernetes_pod_label_app', apps.toSorted()],
    ['__meta_kubernetes_pod_container_port_name', asked.toSorted()],
  ]);
  // By that label KvtierCacheNodeDown knows a node that was never there.
  expect(jobs[0]!.relabel_configs).toContainEqual({
    source_labels: ['__meta_kubernetes_pod_container_name'],
    target_label: 'container',
  });
  const nodes = workloads.flatMap(({ manifest }) =>
    containersOf(manifest.spec.template).filter(({ env }) => env?.some(({ name }) => name === 'KVTIER_CONFIG')),
  );
  expect(new Set(nodes.map(({ name }) => name))).toEqual(new Set(['cache-node']));
  expect(textOf('prometheus/alerts.yml')).toContain('up{container="cache-node"}');
});

it('no roll-out counts as failed while an engine may still start', () => {
  for (const { manifest } of workloads.filter(({ manifest: { kind } }) => kind === 'Deployment')) {
    const { template, progressDeadlineSeconds = 600 } = manifest.spec;
    const starts = containersOf(template).map(({ startupProbe }) =>
      startupProbe === undefined ? 0 : startupProbe.periodSeconds * startupProbe.failureThreshold,
    );
    expect(progressDeadlineSeconds, manifest.metadata.name).toBeGreaterThan(Math.max(...starts) + 120);
  }
});

it('a coordinator may be taken away, and another one stays', () => {
  const budget = all.find(({ manifest }) => manifest.kind === 'PodDisruptionBudget')!.manifest.spec;
  expect(named('kvtier-coordinator').metadata.labels).toMatchObject(budget.selector.matchLabels);
});
