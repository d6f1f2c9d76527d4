export function bundled<T extends URL[]>(...sources: T): Promise<{ [K in keyof T]: string }>;
