/**
 * What a client shows its servers, and whom it trusts, as the files hold it now: they are looked at again while it lives. What is new serves
 * the next connection; what is of no use is told, and changes nothing.
 */
import { createSecureContext, type ConnectionOptions as TlsOptions } from 'node:tls';
import { RenewedFiles, type RenewedFilesOptions } from '@kvtier/config/files';
import { KvError } from '@kvtier/errors';
import type { RedisLogin, RedisServers, ServerAddress } from './servers.ts';

const defaultReloadMs = 10_000;
/** A password with more is a file of something else. */
const maxPasswordBytes = 4_096;

export class RenewedLogin {
  readonly #password: RenewedFiles<string> | undefined;
  readonly #tls: RenewedFiles<TlsOptions> | undefined;
  readonly #make: () => RedisLogin;
  #login: RedisLogin;

  /** `onRenewed`: `login` is another one. KvError CONFIG: a file that cannot be used, TLS that is not spoken. */
  constructor(settings: RedisServers, first: ServerAddress, onRenewed: () => void) {
    const { reloadMs = defaultReloadMs, passwordFile, onProblem = () => {}, database } = settings;
    const common = { reloadMs, onProblem };
    if (passwordFile !== undefined)
      this.#password = renewed({
        files: [{ path: passwordFile, isSecret: false }],
        make: ([bytes]) => passwordIn(bytes!),
        file: 'a readable passwordFile',
        content: 'a file with the password',
        ...common,
      });
    if (!first.isTls && settings.tls !== undefined)
      throw new KvError('CONFIG', 'redis: tls is configured, but the servers begin with redis:; write rediss:');
    const { serverName } = settings.tls ?? {};
    const named = (['caFile', 'certFile', 'keyFile'] as const).flatMap((option) => {
      const path = settings.tls?.[option];
      return path === undefined ? [] : [{ path, name: option.slice(0, -4), isSecret: false }];
    });
    if (named.length > 0)
      this.#tls = renewed({
        files: named,
        make: (bytes) => checked(Object.fromEntries(named.map(({ name }, at) => [name, bytes[at]!]))),
        file: 'readable files (tls)',
        content: 'an authority, a certificate and its key (PEM)',
        ...common,
      });
    this.#make = () => ({
      username: settings.username ?? first.username,
      password: settings.password ?? this.#password?.made ?? first.password,
      database,
      tls: first.isTls ? { ...this.#tls?.made, ...(serverName && { servername: serverName }) } : undefined,
      connectTimeoutMs: settings.timeLimitMs,
    });
    this.#login = this.#make();
    for (const files of [this.#password, this.#tls]) {
      if (files === undefined) continue;
      files.onRenewed = () => {
        this.#login = this.#make();
        onRenewed();
      };
    }
  }

  /** As it is now; another object whenever something of it is another. */
  get now(): RedisLogin {
    return this.#login;
  }

  close(): void {
    this.#password?.close();
    this.#tls?.close();
  }
}

/** @throws KvError CONFIG: a file that cannot be used */
function renewed<T>(options: RenewedFilesOptions<T>): RenewedFiles<T> {
  try {
    return new RenewedFiles(options);
  } catch (error) {
    throw new KvError('CONFIG', `redis: ${(error as Error).message}`);
  }
}

function passwordIn(file: Buffer): string {
  const password = file.toString('utf8').trim();
  if (password === '' || file.length > maxPasswordBytes) throw new Error('holds no password');
  return password;
}

/** @throws what OpenSSL says of files that do not go together, as while one of them is new already */
function checked(pems: TlsOptions): TlsOptions {
  createSecureContext(pems);
  return pems;
}
