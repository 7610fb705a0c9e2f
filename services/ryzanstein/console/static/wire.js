// What the console and the page say to each other; `wire.py` is the other end. Types alone.

/**
 * @typedef {string | [string, number | string | null, Tree[]]} Tree A text, or an element: its kind, an attribute, and what is in it.
 * @typedef {[number, Tree[]]} Block The part that writes its beginning, and its elements.
 * @typedef {{node: string, tokens?: number, silence_ms?: number | null, cause?: string}} Part
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{id: string, version: number, status: string, blocks?: Block[], open?: Block, tail?: [number, string][], parts?: Part[],
 *   reasoning?: string, calls?: string, asked?: Call[], tokens?: number, note?: string, figures?: string, model?: string}} Frame
 * @typedef {{id: string, session: string, question: string, status: string, asked_at: number, generation?: string, model?: string,
 *   prompt_tokens?: number, parts?: Part[], timeline?: [number, number, number][], note?: string, figures?: string,
 *   resumed?: boolean}} Details
 * @typedef {{session: string, question?: string, role?: string, answer?: string, blocks?: Block[], asked?: Call[]}} Turn
 * @typedef {{session: string, title: string, updated: number, node: string, running: boolean}} SessionRow
 * @typedef {{name: string, context: number, nodes: number}} Model
 * @typedef {{at: number, tokens?: Record<string, number>, first?: [number, number], waiting?: Record<string, number>,
 *   unaccepted?: number, running?: number, kv?: Record<string, number>}} Point
 * @typedef {{id: string, address: string, state: string, reason: string, error: string, model: string, draining: boolean,
 *   engine: string, restarts: number, ranks: Rank[], figures: Record<string, string>}} Node
 * @typedef {{rank: number, pid: number, phase: string, step: number, still_s: number, step_ms: number, bytes: number}} Rank
 * @typedef {{node: string, up: boolean, breaker: string, suspicion: string, inflight: number, failure: string}} Link
 * @typedef {{router: string, asked: string, problems: string[], unreached: Record<string, string>, nodes: Node[], more_nodes: number,
 *   routers: {id: string, address: string, draining: boolean}[], links: Link[], models: {name: string, context: number, ready: number}[],
 *   losses: {time: number, node: string, cause: string, inflight: number}[], point: Point}} ClusterState
 */

export {};
