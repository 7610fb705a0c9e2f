// Vercel's ai: tools in several steps, typed output, streams, over its providers for chats, responses and compatible servers.
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, Output, streamText, tool } from 'ai'
import { z } from 'zod'
import { check, City, HUGE, MODEL, PIXEL, refused, RESULTS, run, same, URL } from './loops.mjs'

globalThis.AI_SDK_LOG_WARNINGS = false
const openai = createOpenAI({ baseURL: URL, apiKey: 'none' })
const compatible = createOpenAICompatible({ name: 'ryzanstein', baseURL: URL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true })
const KINDS = { chat: openai.chat(MODEL), responses: openai.responses(MODEL), compatible: compatible(MODEL) }
const providerOptions = { openai: { parallelToolCalls: false } }
const OPTIONS = { maxRetries: 0, maxOutputTokens: 150, temperature: 0, providerOptions }
const tools = {
  weather: tool({ description: 'The weather of a city.', inputSchema: z.object({ city: z.enum(['Rome', 'Oslo']) }), execute: async ({ city }) => RESULTS[city] }),
  read: tool({ description: 'A long file.', inputSchema: z.object({}), execute: async () => HUGE }),
}
// Small models decide nothing: two calls, then the answer.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber < 2 ? { type: 'tool', toolName: 'weather' } : 'none' })
const output = Output.object({ schema: City })
const asked = model => ({ ...OPTIONS, model, tools, output, prepareStep, stopWhen: stepCountIs(3) })

async function whole(model, messages) {
  const result = await generateText({ ...asked(model), messages })
  City.parse(result.output)
  check(result.steps.length === 3 && result.usage.totalTokens > 0, result.steps)
  return result
}

async function streamed(model, messages) {
  const result = streamText({ ...asked(model), messages, onError: () => {} })
  for await (const part of result.fullStream) if (part.type === 'error') throw part.error
  City.parse(await result.output)
  const steps = await result.steps
  check(steps.length === 3 && (await result.usage).totalTokens > 0, steps)
  return steps
}

const said = steps => steps.map(step => [step.toolCalls.map(call => [call.toolName, call.input]), step.text])

async function turns(model) {
  const messages = [{ role: 'user', content: 'How is the weather in Rome?' }]
  for (let turn = 0; turn < 2; turn++) {
    const result = await whole(model, messages)
    same(said(result.steps), said(await streamed(model, messages)))
    messages.push(...(result.responseMessages ?? result.response.messages), { role: 'user', content: 'And in Oslo?' })
  }
  return messages.map(message => message.role)
}

async function choice(model) {
  const chosen = await generateText({ ...OPTIONS, model, output: Output.choice({ options: ['yes', 'no'] }), prompt: 'Yes or no?' })
  check(['yes', 'no'].includes(chosen.output), chosen.output)
  return chosen.output
}

// What earlier turns may have: reasoning, several calls at once, results that are errors, parts or empty.
const results = [{ type: 'error-text', value: 'größer' }, { type: 'content', value: [{ type: 'text', text: 'a' }] }, { type: 'json', value: {} }, { type: 'text', value: '' }]
const call = (_, i) => ({ type: 'tool-call', toolCallId: `c${i}`, toolName: 'read', input: {} })
const HISTORY = [
  { role: 'user', content: 'Read.' },
  { role: 'assistant', content: [{ type: 'reasoning', text: 'Four times.' }, { type: 'text', text: '<think>so</think>Yes.' }, ...results.map(call)] },
  { role: 'tool', content: results.map((output, i) => ({ type: 'tool-result', toolCallId: `c${i}`, toolName: 'read', output })) },
  { role: 'user', content: 'Go on.' },
]

async function aborted(model) {
  const control = new AbortController()
  const result = streamText({ ...OPTIONS, maxOutputTokens: 400, temperature: 1, model, prompt: 'Count.', abortSignal: control.signal, onError: () => {} })
  let parts = 0
  for await (const _ of result.fullStream) if (++parts === 3) control.abort()
  return parts
}

const picture = [{ role: 'user', content: [{ type: 'file', data: PIXEL, mediaType: 'image/png' }] }]
for (const [name, model] of Object.entries(KINDS)) {
  await run(`${name}, turns`, () => turns(model))
  await run(`${name}, choice`, () => choice(model))
  await run(`${name}, history`, async () => (await generateText({ ...OPTIONS, maxOutputTokens: 8, model, tools, messages: HISTORY })).usage)
  await run(`${name}, aborted`, () => aborted(model))
  await refused(`${name}, image`, () => generateText({ ...OPTIONS, model, messages: picture }), 'only text parts are supported')
}
