// Reads an answer to its end, whichever routers and connections are lost meanwhile:
//
//	make && ./answer 127.0.0.1:50051,127.0.0.1:50053 "Count from 1 to 40."
//
// A begin has a key, so that it may be sent again; a started answer is attached to at the next index, at the next router.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	pb "ryzanstein/v1"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	patience  = 30 * time.Second
	firstWait = 50 * time.Millisecond
	mostWait  = 2 * time.Second
)

var errUnfinished = status.Error(codes.Unavailable, "the stream ended before the answer did")

// reader is where one answer stands. index is that of the next token, failures are in a row.
type reader struct {
	routers      []pb.InferenceServiceClient
	begin        *pb.ChatRequest
	generationID string
	index        uint32
	router       int
	failures     int
	since        time.Time
}

// events is what StreamChat and AttachGeneration have in common: the next event, io.EOF after the last.
type events func() (*pb.GenerationEvent, error)

func (r *reader) open(ctx context.Context) (events, error) {
	client := r.routers[r.router%len(r.routers)]
	if r.generationID == "" {
		stream, err := client.StreamChat(ctx, &pb.StreamChatRequest{Chat: r.begin})
		return func() (*pb.GenerationEvent, error) { m, err := stream.Recv(); return m.GetEvent(), err }, err
	}
	stream, err := client.AttachGeneration(ctx, &pb.AttachGenerationRequest{
		GenerationId: r.generationID, FromIndex: map[uint32]uint32{0: r.index}})
	return func() (*pb.GenerationEvent, error) { m, err := stream.Recv(); return m.GetEvent(), err }, err
}

// answer writes the text of one answer. It returns an error that no other router can mend.
func (r *reader) answer(ctx context.Context, out io.Writer) error {
	for {
		err := r.read(ctx, out)
		if err == nil {
			return nil
		}
		if err = r.again(ctx, err); err != nil {
			return err
		}
	}
}

// read reads from one router until the answer is complete or the stream breaks.
func (r *reader) read(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	next, err := r.open(ctx)
	for err == nil {
		var event *pb.GenerationEvent
		if event, err = next(); err != nil {
			break
		}
		r.failures = 0
		switch {
		case event.GetStarted() != nil:
			r.generationID = event.GetStarted().GetGenerationId()
		case event.GetFinished() != nil:
			fmt.Fprintln(out, event.GetFinished().GetText())
			return nil
		case event.GetDelta() != nil:
			delta := event.GetDelta()
			if delta.GetFirstIndex() != r.index {
				return fmt.Errorf("token %d came where %d was expected", delta.GetFirstIndex(), r.index)
			}
			r.index += uint32(len(delta.GetTokenIds()))
			fmt.Fprint(out, delta.GetText())
		}
	}
	if errors.Is(err, io.EOF) {
		return errUnfinished
	}
	return err
}

// again waits before the next router is tried, or returns the error if that is of no use.
func (r *reader) again(ctx context.Context, err error) error {
	found, ok := status.FromError(err)
	if !ok || ctx.Err() != nil {
		return err
	}
	asked, known := retryAfter(found)
	lost := found.Code() == codes.Unavailable || found.Code() == codes.Unknown || found.Code() == codes.Internal
	if !known && (!lost || hasReason(found)) {
		return err
	}
	if r.failures == 0 {
		r.since = time.Now()
	}
	if time.Since(r.since) > patience {
		return err
	}
	wait := firstWait << min(r.failures, 6)
	if wait > mostWait {
		wait = mostWait
	}
	if wait < asked {
		wait = asked
	}
	r.failures, r.router = r.failures+1, r.router+1
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func retryAfter(found *status.Status) (time.Duration, bool) {
	for _, detail := range found.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			delay := info.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos()), true
		}
	}
	return 0, false
}

// hasReason tells an error of the cluster from one of the transport.
func hasReason(found *status.Status) bool {
	for _, detail := range found.Details() {
		if _, ok := detail.(*errdetails.ErrorInfo); ok {
			return true
		}
	}
	return false
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func run(addresses []string, content string, out io.Writer) error {
	key := make([]byte, 16)
	if _, err := rand.Read(key); err != nil {
		return err
	}
	r := reader{begin: &pb.ChatRequest{
		Messages:  []*pb.Message{{Role: pb.Role_ROLE_USER, Content: content}},
		Sampling:  &pb.SamplingParams{Temperature: new(float32)},
		RequestId: fmt.Sprintf("%x", key),
	}}
	for _, address := range addresses {
		var connection *grpc.ClientConn
		connection, err := connect(address)
		if err != nil {
			return err
		}
		defer connection.Close()
		r.routers = append(r.routers, pb.NewInferenceServiceClient(connection))
	}
	return r.answer(context.Background(), out)
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: answer ROUTER[,ROUTER...] TEXT")
		os.Exit(2)
	}
	if err := run(strings.Split(os.Args[1], ","), os.Args[2], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
